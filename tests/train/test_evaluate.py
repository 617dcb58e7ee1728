"""The scores of a detector must not flatter one that ignores its inputs."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

import fastplm.models
from fastplm.train.evaluate import detection_at_base_rate, evaluate

SHARE = 0.2
REPLACED = torch.rand(50_000, generator=torch.Generator().manual_seed(0)) < SHARE


@pytest.mark.parametrize("answer", (-9.0, 0.0, 9.0))
def test_a_constant_answer_has_balanced_accuracy_one_half(answer):
    result = detection_at_base_rate(torch.full((len(REPLACED),), answer), REPLACED)
    assert result["balanced_accuracy"] == 0.5
    assert result["loss"] > result["loss_of_best_constant"]


def test_the_best_constant_is_the_share():
    share = REPLACED.double().mean()
    result = detection_at_base_rate(torch.full((len(REPLACED),), share.logit().item()), REPLACED)
    assert math.isclose(result["loss"], result["loss_of_best_constant"], rel_tol=1e-5)
    assert result["share_replaced"] == share


def test_a_detector_that_knows_something_beats_every_constant():
    noise = torch.randn(len(REPLACED), generator=torch.Generator().manual_seed(1))
    # Log-odds for evidence from unit normals, whose means differ by 1 between the classes.
    evidence = noise + REPLACED
    scores = evidence - 0.5 + math.log(SHARE / (1 - SHARE))
    result = detection_at_base_rate(scores, REPLACED)
    exact = 0.5 * (1 + math.erf(0.5 / math.sqrt(2)))  # both recalls at the middle threshold
    assert abs(result["balanced_accuracy"] - exact) < 4 * result["balanced_accuracy_error"]
    assert result["loss"] < result["loss_of_best_constant"]
    assert result["precision"] > 1.5 * SHARE


def test_a_perfect_detector():
    result = detection_at_base_rate((REPLACED.float() - 0.5) * 40, REPLACED)
    assert result["precision"] == result["recall"] == result["balanced_accuracy"] == 1.0
    assert result["balanced_accuracy_error"] == 0.0


def test_nothing_replaced_is_no_division_by_zero():
    result = detection_at_base_rate(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert result["recall"] == 0.0 and result["loss_of_best_constant"] == 0.0


def test_a_loss_of_no_labels_is_left_out():
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **sizes)
    row = {"input_ids": torch.zeros(4).long(), "labels": torch.full((4,), -100)}
    model = fastplm.models.BertForMaskedLM(config)
    assert evaluate(model, [row] * 3, torch.utils.data.default_collate, 2) == {"samples": 3}


@pytest.mark.parametrize("label", ["next_sentence_label", "sentence_order_label"])
@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_either_label_of_pairs_is_judged_by_the_one_head(family, label):
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = getattr(transformers, f"{family}Config")(vocab_size=9, intermediate_size=8, **sizes)
    torch.manual_seed(0)
    model = getattr(fastplm.models, f"{family}ForPreTraining")(config).eval()
    ids = torch.arange(12).view(3, 4) % 9
    rows = [
        {"input_ids": row, "attention_mask": torch.ones(4).long(), "labels": row, label: place % 2}
        for place, row in enumerate(ids)
    ]
    found = evaluate(model, rows, torch.utils.data.default_collate, 2)
    name = label.removesuffix("_label")
    with torch.no_grad():
        outputs = model(ids)
    answers = outputs["seq_relationship_logits" if family == "Bert" else "sop_logits"]
    wanted = torch.tensor([0, 1, 0])
    expected = torch.nn.functional.cross_entropy(answers, wanted)
    assert found[f"{name}_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert found[f"{name}_accuracy"] == (answers.argmax(-1) == wanted).double().mean()
    both = dict.fromkeys(("next_sentence_label", "sentence_order_label"), wanted)
    with pytest.raises(fastplm.errors.ArgumentValueError, match="one of the two"):
        model(ids, **both)
    theirs = getattr(transformers, f"{family}ForPreTraining")(config)
    with pytest.raises(fastplm.errors.ArgumentTypeError, match=r"evaluate: .*accelerate"):
        evaluate(theirs, rows, torch.utils.data.default_collate, 2)


@pytest.mark.parametrize("family", ("Bart", "T5"))
def test_the_similarity_of_encoder_outputs(family):
    """The mean over all pairs of two tokens; 1 where the encoder gives all of them one output."""
    sizes = {"d_model": 32, "decoder_start_token_id": 0, "vocab_size": 40, "pad_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**sizes, num_layers=1, encoder_layers=1)
    model = getattr(fastplm.models, f"{family}ForConditionalGeneration")(config).eval()
    ids = torch.arange(2, 26).view(4, 6)
    rows = [
        {"input_ids": row, "attention_mask": torch.ones(6).long(), "labels": row} for row in ids
    ]
    rows[1]["attention_mask"] = torch.tensor([1, 1, 1, 0, 0, 0])

    def similarity():
        result = evaluate(model, rows, torch.utils.data.default_collate, 3)
        return result["encoder_similarity"]

    mask = torch.stack([row["attention_mask"] for row in rows])
    with torch.no_grad():
        states = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        states = states[mask.bool()].double()
        cosines = torch.nn.functional.cosine_similarity(states[:, None], states, dim=-1)
        pairs = ~torch.eye(len(states), dtype=torch.bool)
        assert abs(similarity() - cosines[pairs].mean()) < 1e-5
        for parameter in model.get_encoder().parameters():
            parameter.fill_(1.0)  # the same embedding for all tokens, and for all places
    assert similarity() == pytest.approx(1.0, abs=1e-5)
