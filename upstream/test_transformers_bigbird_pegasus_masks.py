"""BigBird-Pegasus under a registered attention equals its eager attention."""

import copy

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BigBirdPegasusConfig,
    BigBirdPegasusModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SIZES = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 64,
    "init_std": 0.5,
}
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


@pytest.fixture
def outputs():
    """Those of eager attention and of a registered one, for texts too short for sparse blocks."""
    AttentionInterface.register("registered", sdpa_attention_forward)
    AttentionMaskInterface.register("registered", sdpa_mask)
    torch.manual_seed(0)
    eager = BigBirdPegasusModel(BigBirdPegasusConfig(**SIZES, attn_implementation="eager")).eval()
    model = copy.deepcopy(eager)
    model.set_attn_implementation("registered")
    ids, targets = torch.randint(5, 50, (3, 5)), torch.randint(5, 50, (3, 4))
    with torch.no_grad():
        return [
            m(input_ids=ids, attention_mask=MASK, decoder_input_ids=targets) for m in (eager, model)
        ]


def test_the_encoder_masks_padding(outputs):
    eager, found = (each.encoder_last_hidden_state[MASK.bool()] for each in outputs)
    torch.testing.assert_close(found, eager)


def test_the_decoder_is_causal(outputs):
    eager, found = (each.last_hidden_state for each in outputs)
    torch.testing.assert_close(found, eager)
