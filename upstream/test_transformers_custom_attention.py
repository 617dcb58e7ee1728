"""A registered attention in models that do not call the attention interface."""

import copy

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "embedding_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
    "initializer_range": 0.5,
}
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(autouse=True)
def registered():
    AttentionInterface.register("registered", sdpa_attention_forward)
    AttentionMaskInterface.register("registered", sdpa_mask)


def build(name, implementation):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**SIZES, attn_implementation=implementation)
    return kind(copy.deepcopy(config)).eval()


@pytest.mark.parametrize("name", ["RoFormerModel", "MPNetModel", "MegatronBertModel"])
def test_a_model_with_attention_of_its_own_stays_right(name):
    eager, model = build(name, "eager"), build(name, "registered")
    model.load_state_dict(eager.state_dict())
    ids = torch.randint(5, 50, MASK.shape)
    with torch.no_grad():
        expected, found = (m(ids, attention_mask=MASK).last_hidden_state for m in (eager, model))
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()])
    assert model.config._attn_implementation == "eager"


def test_a_model_that_calls_the_interface_still_takes_it():
    assert build("BertModel", "registered").config._attn_implementation == "registered"
