"""Training mode: the same seed repeats every class, and dropout is as strong as the parent's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastplm import models

from .conftest import CLASSES, PADDINGS, PREFIXES, config_of, gradients, inputs_of, pair, same

# Much attention dropout, so that a missing or wrong one shows in few runs.
ENCODER: dict[str, Any] = dict(
    initializer_range=0.5, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.1
)
GPT: dict[str, Any] = dict(initializer_range=0.5, attn_pdrop=0.5, resid_pdrop=0.1, embd_pdrop=0.1)
CHANGES: dict[str, dict[str, Any]] = {
    "albert": ENCODER,
    "bert": ENCODER,
    "electra": ENCODER,
    "roberta": dict(ENCODER, pad_token_id=0),
    "gpt2": GPT,
    "openai": GPT,
    "bart": dict(init_std=0.5, dropout=0.1, attention_dropout=0.5, pad_token_id=0),
    "t5": dict(dropout_rate=0.4),
}
RUNS = 200
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "mc_token_ids")


def config(name: str) -> Any:
    made = config_of(name)
    made.update(CHANGES[CLASSES[name]])
    return made


def batch(name: str) -> dict[str, Any]:
    """A padded batch; of labels, only those that a model makes its decoder's input of."""
    given = inputs_of(name, config(name), PADDINGS["right"])
    labelled = "labels" if name.endswith("ForConditionalGeneration") else ""
    return {k: v for k, v in given.items() if k == labelled or k in INPUTS}


def numbers(outputs: Any) -> Tensor:
    """The first 8 numbers of each output, and the loss."""
    found = [value for value in outputs.values() if isinstance(value, Tensor)]
    return torch.cat([value.flatten()[:8] for value in found])


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_seed_gives_the_same_bits(name):
    model = getattr(models, name)(config(name)).train()
    inputs = batch(name)

    def run(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        out = numbers(model(**inputs))
        return gradients(model, out.sum()) | {"out": out.detach()}

    first, second, third = run(0), run(0), run(1)
    assert same(first, second)
    assert not torch.equal(first["out"], third["out"])
    model.eval()
    with torch.no_grad():
        assert torch.equal(numbers(model(**inputs)), numbers(model(**inputs)))


@pytest.mark.parametrize("name", PREFIXES.values())
def test_dropout_has_the_parents_mean_and_variance(name):
    """The first two moments of a model's answers over seeds, by a two-sample z-test each."""
    name = f"{name}Model"
    ours, parent = (model.train() for model in pair(name, config(name)))
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
