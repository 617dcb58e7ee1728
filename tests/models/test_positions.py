"""Texts beyond the positions, in every text model of Transformers: cut off, or one clear error."""

from __future__ import annotations

import copy

import pytest
import torch

import fastplm
import survey_models
from fastplm.errors import ArgumentValueError, FastplmError, UnsupportedError
from fastplm.models._base import most_positions

CASES = {case.name: case for case in survey_models.cases()}
#: Outside the nine families; the first rows of the tables of some belong to no position.
SOME = (
    *(
        "bert-generation",
        "biogpt",
        "camembert",
        "ctrl",
        "data2vec-text",
        "distilbert",
        "ernie",
        "esm",
    ),
    *("gpt_neo", "ibert", "layoutlm", "lilt", "longformer", "luke", "markuplm", "mbart"),
    *("megatron-bert", "mpnet", "nystromformer", "opt", "roberta-prelayernorm", "roc_bert"),
    *(
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
        "llama",
        "electra",
        "t5",
        "roformer",
        "tapas",
    ),
)
#: Their longest text is no field, or not the same in all parts.
OTHERS = ("encoder-decoder", "funnel", "led", "prophetnet")
#: Transformers has an error of its own.
NO_TABLE = ("tipsv2_text_model", "clip_text_model")


def reads(model, seqlen):
    """None, or what a text of this length raises."""
    inputs = {
        name: value[:1].repeat(1, seqlen // value.shape[1] + 1)[:, :seqlen]
        if name == "input_ids"
        else value[:1]
        for name, value in survey_models.batch(model, None).items()
    }
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        return error
    return None


def check(name):
    try:
        model = survey_models.build(CASES[name], "eager")
    except Exception as error:
        pytest.skip(f"no small model of it is built: {error}")
    most = most_positions(model.config)
    if (most or 0) > 1000 or reads(model, most or 8) is not None:
        pytest.skip("the small model takes no text of this length")
    ours = copy.deepcopy(model)
    try:
        fastplm.accelerate(ours)
        taken = reads(ours, 8) is None
    except UnsupportedError:
        taken = False
    for seqlen in (most, most + 1, most + 40) if most else (200,):
        raised = reads(model, seqlen)
        assert raised is None or seqlen > (most or 0), "more than Transformers takes"
        found = reads(ours, seqlen)
        if not taken or name.split()[0] in NO_TABLE:
            continue
        assert (found is None) == (raised is None), (seqlen, raised, found)
        if raised is not None:
            assert isinstance(found, ArgumentValueError)
            assert f"at most {most}, the positions of this model" in str(found)
    if taken and most:
        assert not isinstance(reads(fastplm.restore(ours), most + 1), FastplmError)


@pytest.mark.parametrize("name", SOME)
def test_the_longest_text(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] not in OTHERS])
def test_the_longest_text_of_every_model(name):
    check(name)


@torch.no_grad()
def test_a_text_after_a_cache():
    """The tokens of the cache count, too."""
    model = fastplm.accelerate(survey_models.build(CASES["biogpt"], "eager"))
    ids = torch.randint(5, 60, (1, 60))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    model(input_ids=ids[:, :4], past_key_values=copy.deepcopy(cache))
    with pytest.raises(ArgumentValueError, match="5 tokens after 60 in the cache"):
        model(input_ids=ids[:, :5], past_key_values=cache)
