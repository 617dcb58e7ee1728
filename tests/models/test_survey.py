"""docs/families.md: every text model of Transformers is right, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import fastplm
import survey_models
from fastplm import hf
from fastplm.errors import UnsupportedError
from survey_models import Case

PAGE = Path(__file__).parents[2] / "docs/families.md"
SAMPLE = {
    "bert": "a drop-in class",
    "mobilebert": "an encoder of the interface",
    "mistral": "grouped heads, a sliding window",
    "splinter": "its attention does not say whether it is causal",
    "bigbird_pegasus": "has attention of its own beside the interface",
    "doge": "wants masks in full",
    "prophetnet": "adds masks to its scores",
    "rembert": "has the shape of BERT's layers",
    "bloom": "loses causality without a mask",
    "deberta": "ignores the name",
    "falcon": "looks the name up in a table of its own",
    "fnet": "has no attention",
    "deepseek_v32": "passes the keys that it chose",
    "gpt_oss": "passes attention sinks",
    "inkling2_text": "passes attention sinks by another name",
}


def table():
    """The page's table: {model: (verdict by name, verdict by accelerate)}."""
    lines = PAGE.read_text().split("| model | by name | by accelerate |")[1].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    return {name: tuple(verdicts) for name, *verdicts in cells}


def check(name):
    case = next(case for case in survey_models.cases() if case.name == name)
    for route, expected in zip(survey_models.ROUTES, table()[name], strict=True):
        assert survey_models._cell(survey_models.survey(case, route)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_as_the_page_says(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in survey_models.cases()])
def test_every_model_is_as_the_page_says(name):
    if name not in table():
        assert name in PAGE.read_text().split("Not tried")[1]
        pytest.skip("no small model of it is built")
    check(name)


def test_no_model_is_silently_wrong():
    rows = table()
    assert len(rows) > 200
    for name, verdicts in rows.items():
        for verdict in verdicts:
            assert verdict.split(":")[0] in ("drop-in", "attention", "refused", "nothing"), name


@pytest.mark.parametrize("broken", ("causality", "padding", "gradients"))
def test_the_survey_finds_what_is_wrong(monkeypatch, broken):
    right = hf.fastplm_attention_forward

    def wrong(module, query, key, value, attention_mask, **kwargs):
        if broken == "gradients":
            value = value.detach()
        elif (broken == "causality") == (attention_mask.dim() == 5):
            attention_mask = torch.ones(1, 1, 1, 0, dtype=torch.bool)
        return right(module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register(hf.NAME, wrong)
    try:
        kind = "LlamaForCausalLM" if broken == "causality" else "GPTNeoXForCausalLM"
        row = survey_models.survey(Case("x", getattr(transformers, kind), {}), "name")
    finally:
        transformers.AttentionInterface.register(hf.NAME, right)
    assert row.verdict == "wrong" and ("sees later" in row.why) == (broken == "causality")
    assert broken == "causality" or broken in row.why


class Own(transformers.PreTrainedModel):
    """A model whose module has an attention class that does not use the attention interface."""

    config_class = transformers.BertConfig


class OwnAttention(torch.nn.Module):
    pass


def test_a_model_of_the_user_with_attention_of_its_own_is_refused():
    assert hf.attention_of(Own) == "own"
    with pytest.raises(UnsupportedError, match="Leave attn_implementation out, or use 'eager'"):
        Own._from_config(transformers.BertConfig(), attn_implementation=hf.NAME)
    with pytest.raises(UnsupportedError, match="cannot change"):
        fastplm.accelerate(Own(transformers.BertConfig()))


def test_a_model_with_attention_of_its_own_beside_the_interface_is_refused():
    """BigBird-Pegasus' encoder adds the mask to its scores, unless its texts are long."""
    config = transformers.BigBirdPegasusConfig(vocab_size=99, d_model=16, encoder_layers=1)
    model = transformers.BigBirdPegasusModel(config).eval()
    with pytest.raises(UnsupportedError, match="Leave attn_implementation out, or use 'eager'"):
        model.set_attn_implementation(hf.NAME)
    with pytest.raises(UnsupportedError, match="cannot change"):
        fastplm.accelerate(model)


class Extends(transformers.BertPreTrainedModel):
    """A user's model with BERT's attention is taken, although its module has other attention."""


class ExtendsDeberta(transformers.DebertaPreTrainedModel):
    """DeBERTa's attention is refused, whatever AutoModel or other models its module has."""


def test_a_model_of_the_user_has_the_attention_of_the_one_that_it_extends():
    assert hf.attention_of(Extends) == "interface"
    assert hf.attention_of(ExtendsDeberta) == "own"


def test_a_name_that_changes_nothing_says_so_once():
    case = next(case for case in survey_models.cases() if case.name == "fnet")
    model = survey_models.build(case, "eager")
    with survey_models._warnings() as said:
        model.set_attn_implementation(hf.NAME)
        model.set_attn_implementation("eager")
        model.set_attn_implementation(hf.NAME)
    assert len([line for line in said if "changes nothing in FNetForMaskedLM" in line]) == 1
