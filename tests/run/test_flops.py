"""The FLOPs of training: by hand, and against PyTorch's count for Transformers' models.

``tests/benchmarks/test_steps.py`` compares every family's step with PyTorch's count.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from fastplm.models.electra_joint import ElectraJointConfig
from fastplm.run.flops import flops_a_token, training_flops

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 16}


def test_by_hand():
    config = transformers.BertConfig(**SIZES)
    layer = 4 * 8 * 8 + 2 * 8 * 16
    head = 8 * 8 + 8 * 11
    flops = 6 * (10 * 3 * layer + 3 * 2 * 8 * (6 * 6 + 4 * 4) + 5 * head)
    assert training_flops(config, [6, 4], masked=0.5) == flops
    shared = transformers.AlbertConfig(**SIZES, embedding_size=4)
    head = 8 * 4 + 4 * 11
    flops = 6 * (16 * (3 * layer + 4 * 8) + 3 * 2 * 8 * 16 * 16 + 4 * head)
    assert 16 * flops_a_token(shared, 16, masked=0.25) == flops


def test_a_gpt_by_hand():
    """Each row attends to itself and those before it, and the last one predicts nothing."""
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 3, "n_head": 2}
    flops = 6 * (9 * 3 * (4 * 8 * 8 + 8 * 64) + 3 * 2 * 8 * (21 + 6) + 7 * 8 * 11)
    for config in (transformers.GPT2Config(**sizes), transformers.OpenAIGPTConfig(**sizes)):
        assert training_flops(config, [6, 3]) == flops


@pytest.mark.parametrize("objective", ["rtd", "rtd_masked", "replace_mlm", "all_tokens_mlm"])
def test_electra_objectives(objective):
    sizes = {**SIZES, "embedding_size": 4}
    joint = ElectraJointConfig.from_discriminator(
        transformers.ElectraConfig(**sizes), generator_size=0.5, objective=objective
    )
    layer, embedded = 4 * 8 * 8 + 2 * 8 * 16, 4 * 8
    large = 16 * (3 * layer + embedded) + 3 * 2 * 8 * 16 * 16
    small = 16 * (3 * (4 * 4 * 4 + 2 * 4 * 8)) + 3 * 2 * 4 * 16 * 16
    words = 8 * 4 + 4 * 11
    judged = {
        "rtd": 16 * 72,
        "rtd_masked": 4 * 72,
        "replace_mlm": 4 * words,
        "all_tokens_mlm": 16 * (words + 8),
    }
    filled = small + 4 * (4 * 4 + 4 * 11)
    both = 6 * (filled + large + judged[objective])
    assert training_flops(joint, [16], masked=0.25) == both
    joint.generator_type = "unigram"
    assert training_flops(joint, [16], masked=0.25) == 6 * (large + judged[objective])


def test_two_stages_cost_the_mean_of_both():
    sizes = transformers.ElectraConfig(**SIZES, embedding_size=8)
    options = {"generator_size": 1.0, "embedding_sharing": "none"}
    joint = ElectraJointConfig.from_discriminator(sizes, **options)
    staged = ElectraJointConfig.from_discriminator(sizes, stage=1, **options)
    config = copy.copy(sizes)
    generator = training_flops(config, [16])
    together = training_flops(joint, [16])
    # The generator is trained for half of the steps; in the other half it has only a forward.
    expected = (generator + generator // 3 + together - generator) // 2
    assert training_flops(staged, [16]) == expected


def test_as_pytorch_counts_a_t5_of_other_widths():
    config = transformers.T5Config(
        vocab_size=19, d_model=8, d_kv=6, num_heads=3, d_ff=20, num_layers=2, num_decoder_layers=3
    )
    model = transformers.T5ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    ids = torch.zeros(1, 5, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids[:, :1])
    # With one token in the decoder, causal attention has only one pair.
    assert training_flops(config, [5], [1]) == 3 * counter.get_total_flops()
