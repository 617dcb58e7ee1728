"""Dropout on: every class repeats itself under a seed, and drops as much as its parent does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastplm import models

SIZES: dict[str, Any] = dict(vocab_size=37, pad_token_id=0)
ENCODER = dict(
    SIZES,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
    initializer_range=0.5,
    # Much, so that a missing or wrong one shows in few runs.
    attention_probs_dropout_prob=0.5,
    hidden_dropout_prob=0.1,
)
GPT = dict(
    vocab_size=37,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=20,
    initializer_range=0.5,
    attn_pdrop=0.5,
)
CONFIGS = {
    "Bert": transformers.BertConfig(**ENCODER),
    "Roberta": transformers.RobertaConfig(**ENCODER),
    "Albert": transformers.AlbertConfig(**ENCODER, embedding_size=8),
    "Electra": transformers.ElectraConfig(**ENCODER, embedding_size=8),
    "GPT2": transformers.GPT2Config(**GPT, pad_token_id=0),
    "OpenAIGPT": transformers.OpenAIGPTConfig(**GPT, pad_token_id=0),
    "Bart": transformers.BartConfig(
        **SIZES,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=20,
        init_std=0.5,
        attention_dropout=0.5,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    ),
    "T5": transformers.T5Config(
        **SIZES,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        eos_token_id=1,
        decoder_start_token_id=0,
        dropout_rate=0.4,
    ),
}
MODEL_OF = {family: getattr(transformers, f"{family}Model") for family in CONFIGS}
RUNS = 200


def family_of(name: str) -> str | None:
    return next((family for family in CONFIGS if name.startswith(family)), None)


CLASSES = [
    name
    for name in models.__all__
    if family_of(name) and "Joint" not in name and issubclass(getattr(models, name), nn.Module)
]


def config(name: str) -> Any:
    made = copy.deepcopy(CONFIGS[str(family_of(name))])
    if name.endswith(("CausalLM", "LMHeadModel")) and hasattr(made, "is_decoder"):
        made.is_decoder = True
    return made


def batch(name: str) -> dict[str, Tensor]:
    """Two sequences of 7 and 4 tokens, each with one end of sequence."""
    ids = torch.randint(5, 37, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    ends = 1 if name.startswith("T5") else 2
    ids[0, 6] = ids[1, 3] = ends
    ids = ids.masked_fill(mask == 0, 0)
    given = {"input_ids": ids, "attention_mask": mask}
    if name.endswith("MultipleChoice"):
        given = {key: value[None] for key, value in given.items()}
    if name in ("BartModel", "T5Model", "T5ForTokenClassification"):
        if name != "T5ForTokenClassification":
            given["decoder_input_ids"] = ids
    if name.endswith("ForConditionalGeneration"):
        given["labels"] = ids.masked_fill(mask == 0, -100)
    return given


def numbers(outputs: Any) -> Tensor:
    """What a model says of the first token of the first sequence, and its loss."""
    found = [value for value in outputs.values() if isinstance(value, Tensor)]
    return torch.cat([value.flatten()[:8] for value in found])


@pytest.mark.parametrize("name", CLASSES)
def test_a_seed_repeats_every_bit(name):
    model = getattr(models, name)(config(name)).train()
    inputs = batch(name)

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        out = numbers(model(**inputs))
        out.sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    first, second, third = run(0), run(0), run(1)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert not torch.equal(first[0], third[0])
    model.eval()
    with torch.no_grad():
        assert torch.equal(numbers(model(**inputs)), numbers(model(**inputs)))


@pytest.mark.parametrize("family", CONFIGS)
def test_as_much_is_dropped_as_by_the_parent(family):
    """The first two moments of a model's answers over seeds, by a two-sample z-test each."""
    name = f"{family}Model"
    ours = getattr(models, name)(config(name)).train()
    parent = MODEL_OF[family]._from_config(config(name), attn_implementation="eager").train()
    parent.load_state_dict(ours.state_dict())
    inputs = batch(name)

    def moments(model: nn.Module) -> Tensor:
        runs = []
        with torch.no_grad():
            for seed in range(RUNS):
                torch.manual_seed(seed)
                runs.append(model(**inputs)[0][0].flatten().double())
        values = torch.stack(runs)  # [RUNS, tokens * width]
        gold = copy.deepcopy(ours).eval().double()(**inputs)[0][0].flatten().detach()
        return torch.cat((values, (values - gold).square()), 1)

    mine, theirs = moments(ours), moments(parent)
    spread = ((mine.var(0) + theirs.var(0)) / RUNS).sqrt()
    z = (mine.mean(0) - theirs.mean(0)) / spread
    # Of so many numbers the largest would pass 5 by chance once in ten thousand times.
    assert z.abs().max() < 5, z.abs().max()
    assert (mine.var(0) > 0).all()
