"""The scores of a detector must not flatter one that ignores its inputs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import transformers

import fastplm.models
from fastplm.pretrain.evaluate import detection_at_base_rate, evaluate, ngram_losses

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


def test_the_labels_that_are_not_in_the_source():
    """Each token of a source answers to one label, padding to none."""
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "vocab_size": 40}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = fastplm.models.T5ForConditionalGeneration(config)
    sources = [[5, 6, 7, 7, 1, 0], [9, 8, 7, 1, 0, 0]]
    labels = [[5, 7, 7, 7, 1, -100], [7, 7, 0, 1, -100, -100]]  # lacking: a 7; a 7 and the 0
    rows = [
        {"input_ids": source, "attention_mask": source != 0, "labels": label}
        for source, label in zip(torch.tensor(sources), torch.tensor(labels), strict=True)
    ]
    for size in (1, 2):
        found = evaluate(model, rows, torch.utils.data.default_collate, size)
        assert found["missing_share"] == 3 / 9


@pytest.fixture
def joint():
    """A function that makes the joint model of an objective, and six samples of eight tokens."""
    from fastplm.models import ElectraForJointPreTraining, ElectraJointConfig

    sizes = {"hidden_size": 16, "embedding_size": 16, "num_attention_heads": 2}
    config = transformers.ElectraConfig(
        vocab_size=30, num_hidden_layers=1, intermediate_size=32, initializer_range=0.5, **sizes
    )
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 30, (6, 8), generator=draws)
    chosen = torch.rand(6, 8, generator=draws) < 0.4
    rows = [
        {
            "input_ids": row.masked_fill(mask, 4),
            "attention_mask": torch.ones(8).long(),
            "labels": row.masked_fill(~mask, -100),
            "sample_index": torch.tensor(place),
        }
        for place, (row, mask) in enumerate(zip(ids, chosen, strict=True))
    ]

    def make(objective):
        torch.manual_seed(0)
        chosen = ElectraJointConfig.from_discriminator(config, objective=objective)
        return ElectraForJointPreTraining(chosen).eval(), rows, ids

    return make


class _Collate:
    """What ``evaluate`` asks of a collator: batches, and the special tokens."""

    tokenizer = type("", (), {"all_special_ids": [0, 1, 2, 3, 4]})

    def __call__(self, rows):
        return torch.utils.data.default_collate(rows)


def test_a_discriminator_that_predicts_all_tokens_is_judged_by_the_chosen_ones(joint):
    """Most others can be copied, and so a model that knows nothing has a low loss.

    Nor does the copy mechanism count: it makes the chosen tokens dear for a model that knows them.
    """
    model, rows, ids = joint("all_tokens_mlm")
    found = evaluate(model, rows, _Collate(), 4)
    batch = torch.utils.data.default_collate(rows)
    with torch.no_grad():
        replaced = model(**batch, output_replaced_ids=True).replaced_ids
        hidden = model.discriminator.electra(replaced).last_hidden_state
        logits = model.discriminator.generator_lm_head(
            model.discriminator.generator_predictions(hidden)
        )
        copy = model.copy_head(hidden).sigmoid()
    kept = torch.nn.functional.one_hot(replaced, 30)
    losses = -(copy * kept + (1 - copy) * logits.softmax(-1)).log()
    losses = losses.gather(-1, ids[..., None]).squeeze(-1)
    chosen = batch["labels"] != -100
    assert found["discriminator_mlm_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    originals = ids[..., None]
    expected = -logits.log_softmax(-1).gather(-1, originals).squeeze(-1)[chosen].mean().item()
    assert found["discriminator_chosen_loss"] == pytest.approx(expected, rel=1e-5)
    assert "discriminator_chosen_loss" not in evaluate(*joint("replace_mlm")[:2], _Collate(), 4)


def test_electra_15_is_judged_by_the_tokens_that_it_learns_of(joint):
    model, rows, ids = joint("rtd_masked")
    batch = torch.utils.data.default_collate(rows)
    with torch.no_grad():
        replaced = model(**batch, output_replaced_ids=True).replaced_ids
    chosen = batch["labels"] != -100
    share = (replaced != ids)[chosen].double().mean().item()
    assert evaluate(model, rows, _Collate(), 4)["words"]["share_replaced"] == share > 0.5
    usual, _, _ = joint("rtd")
    assert evaluate(usual, rows, _Collate(), 4)["words"]["share_replaced"] < 0.5


CLASSES = {
    "model": transformers.BertForPreTraining,
    "generator": transformers.ElectraForMaskedLM,
    "discriminator": transformers.ElectraForPreTraining,
}


def test_what_a_model_has_to_beat(bert, electra):
    held_out = json.loads((bert / "metrics.json").read_text())["held_out"]
    # The sentences have few words in a fixed order: the one before says much.
    assert 0 < held_out["bigram_loss"] < held_out["unigram_loss"] < math.log(120)
    assert 0 <= held_out["mlm_accuracy"] <= 1
    assert "mlm_accuracy" in json.loads((electra / "metrics.json").read_text())["held_out"]


def test_ngram_losses_by_hand():
    train, held_out = np.array([0, 1, 0, 1, 2], dtype=np.uint16), np.array([0, 1, 3, 2], np.uint16)
    alone = {0: 3 / 9, 1: 3 / 9, 2: 2 / 9, 3: 1 / 9}
    found = ngram_losses(train, held_out, 4)
    expected = -sum(math.log(alone[i]) for i in (0, 1, 3, 2)) / 4
    assert found["unigram_loss"] == pytest.approx(expected)
    # 0 was followed by 1 twice; 1 by 0 and 2, and never by 3; nothing followed 3.
    pairs = (2 + alone[1]) / 3, 2 * alone[3] / 4, alone[2]
    assert found["bigram_loss"] == pytest.approx(-sum(map(math.log, pairs)) / 3)
    # The probabilities after a token add up to 1.
    for token in range(4):
        each = [ngram_losses(train, np.array([token, i]), 4)["bigram_loss"] for i in range(4)]
        assert sum(math.exp(-loss) for loss in each) == pytest.approx(1)


@pytest.mark.parametrize("folder", ["model", "generator"])
def test_the_accuracy_of_masked_tokens(bert, electra, folder):
    path = (bert if folder == "model" else electra) / folder
    plain = CLASSES[folder].from_pretrained(path).eval()
    ids = torch.randint(5, 100, (6, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 3 == 0, (ids * 7) % 100, -100)
    with torch.no_grad():
        logits = plain(ids)[0]
    wanted = labels != -100
    labels[wanted] = labels[wanted].where(ids[wanted] % 2 == 0, logits.argmax(-1)[wanted])
    expected = (logits.argmax(-1) == labels)[wanted].double().mean()
    rows = [{"input_ids": ids[i], "labels": labels[i]} for i in range(6)]
    ours = getattr(fastplm.models, type(plain).__name__).from_pretrained(path)
    found = evaluate(ours, rows, torch.utils.data.default_collate, 4)
    assert 0.3 < expected < 1 and found["mlm_accuracy"] == pytest.approx(expected.item())
    # As a Trainer in bf16 leaves a model: its forward runs under autocast.
    ours.forward = torch.autocast("cpu", torch.bfloat16)(ours.forward)
    found = evaluate(ours, rows, torch.utils.data.default_collate, 4)
    assert abs(found["mlm_accuracy"] - expected) < 0.2
