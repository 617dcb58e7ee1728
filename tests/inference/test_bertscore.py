"""BERTScore: the paper's formula, pair by pair, on the parent's states of each text alone."""

from __future__ import annotations

import math

import pytest
import torch

from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError
from fastplm.inference import bertscore as module
from fastplm.inference.bertscore import bert_score

from ..models.conftest import PREFIXES, every_family, pair
from .conftest import hold, states_of

CANDIDATES = ["ab cde", "p", "abc defg", "fg fg", "p", "olm nop bad", "k", "k"]
REFERENCES = ["ab cdf", "p", "hi klm abc", "fg", "abc", "nop olm bad hh", "lm k", " lm k "]


def by_hand(parent, tokenizer, candidates, references, weight, layer=-1):
    """The scores [pairs, 3], by the paper's formula."""
    rows = []
    for texts in zip(candidates, references, strict=True):
        ids = [tokenizer(text.strip())["input_ids"] for text in texts]
        x, y = (torch.nn.functional.normalize(states_of(parent, i)[layer]) for i in ids)
        if min(map(len, ids)) == 2:
            rows.append(x.new_zeros(3))
            continue
        best = x @ y.T
        weights = [x.new_tensor([weight(i) for i in each]) for each in ids]
        precision = weights[0] @ best.max(1).values / weights[0].sum()
        recall = weights[1] @ best.max(0).values / weights[1].sum()
        rows.append(torch.stack([precision, recall, 2 * precision * recall / (precision + recall)]))
    return torch.stack(rows)


def plain(token):
    return 0.0 if token in (2, 3) else 1.0  # [CLS] and [SEP] count nothing


def idf(tokenizer, texts):
    documents = [set(tokenizer(text.strip())["input_ids"]) for text in texts]

    def weight(token):
        count = sum(token in document for document in documents)
        return math.log((len(texts) + 1) / (count + 1))

    return weight


def ours(*texts, **options):
    return lambda model: torch.stack(bert_score(*texts, model, **options), 1)


@every_family
@pytest.mark.parametrize("layer", [None, 1])
def test_scores_are_those_of_the_formula(family, layer, tokenizer):
    texts, parents = (CANDIDATES, REFERENCES), -1 if layer is None else layer
    hold(
        *pair(f"{PREFIXES[family]}Model"),
        ours(*texts, tokenizer=tokenizer, layer=layer, batch_tokens=9),
        lambda parent: by_hand(parent, tokenizer, *texts, plain, parents),
    )


@pytest.mark.parametrize("counted", [None, ["ab", "ab p", "cd"]])
def test_rare_tokens_weigh_more(counted, tokenizer):
    weight = idf(tokenizer, REFERENCES if counted is None else counted)
    hold(
        *pair("BertModel"),
        ours(CANDIDATES, REFERENCES, tokenizer=tokenizer, idf=counted or True),
        lambda parent: by_hand(parent, tokenizer, CANDIDATES, REFERENCES, weight),
    )


def test_the_best_of_several_references_counts(tokenizer):
    model, parent = pair("BertModel")
    several = [REFERENCES[:2], REFERENCES[2:3], REFERENCES[3:7]]
    candidates = [CANDIDATES[0]] * 2 + [CANDIDATES[2]] + [CANDIDATES[3]] * 4

    def theirs(parent):
        scores = by_hand(
            parent, tokenizer, candidates, REFERENCES[:7], idf(tokenizer, REFERENCES[:7])
        )
        return torch.stack([part.max(0).values for part in scores.split([2, 1, 4])])

    texts = [CANDIDATES[0], CANDIDATES[2], CANDIDATES[3]]
    hold(model, parent, ours(texts, several, tokenizer=tokenizer, idf=True), theirs)


def test_empty_texts_have_0(tokenizer):
    model, _ = pair("BertModel")
    score = bert_score(["", "ab", " "], ["ab", "", ""], model, tokenizer)
    assert torch.equal(torch.stack(score), torch.zeros(3, 3))
    assert [len(part) for part in bert_score([], [], model, tokenizer)] == [0, 0, 0]


@pytest.mark.parametrize("room", [1, 20])  # tokens; room 1 matches each pair alone
def test_each_text_is_encoded_once_and_dropped_after_its_last_pair(room, tokenizer, monkeypatch):
    """Scores do not depend on the pairs matched together, nor on repeated texts."""
    model, _ = pair("BertModel")
    expected = bert_score(CANDIDATES, REFERENCES, model, tokenizer)
    computed, kept = [], []
    model.embeddings.register_forward_hook(lambda m, i, output: computed.append(output.shape[1]))
    scores = module._scores
    monkeypatch.setattr(module, "_PAIR_TOKENS", room)
    monkeypatch.setattr(
        module,
        "_scores",
        lambda pairs, states, *rest: kept.append(len(states)) or scores(pairs, states, *rest),
    )
    found = bert_score(CANDIDATES, REFERENCES, model, tokenizer)
    distinct = {text.strip() for text in CANDIDATES + REFERENCES}
    assert sum(computed) == sum(len(tokenizer(text)["input_ids"]) for text in distinct)
    assert len(kept) > 3 and max(kept) < len(distinct)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_layers_above_are_not_computed(tokenizer):
    model, _ = pair("BertModel")
    ran = []
    model.encoder.layer[1].register_forward_hook(lambda *_: ran.append(1))
    bert_score(CANDIDATES, REFERENCES, model, tokenizer, layer=1)
    assert not ran


def test_scores_above_a_baseline(tokenizer, tmp_path):
    model, _ = pair("BertModel")
    plain_scores = torch.stack(bert_score(CANDIDATES, REFERENCES, model, tokenizer, layer=1), 1)
    numbers = torch.tensor([0.25, 0.5, -0.5])
    expected = (plain_scores - numbers) / (1 - numbers)
    file = tmp_path / "baseline.tsv"
    for separator in ",\t":
        lines = (["LAYER", "P", "R", "F"], ["0", "0", "0", "0"], ["1", "0.25", "0.5", "-0.5"])
        file.write_text("\n".join(map(separator.join, lines)))
        for given in (file, str(file), (0.25, 0.5, -0.5)):
            score = bert_score(CANDIDATES, REFERENCES, model, tokenizer, layer=1, baseline=given)
            torch.testing.assert_close(torch.stack(score, 1), expected)
    with pytest.raises(DataError, match="without a line of layer 2"):
        bert_score(CANDIDATES, REFERENCES, model, tokenizer, baseline=file)


@pytest.mark.parametrize(
    "texts, options, error, said",
    [
        (("ab", ["ab"]), {}, ArgumentTypeError, "`candidates` got a str"),
        ((["ab"], ["ab", "c"]), {}, ArgumentValueError, "`references` got 2 for 1 candidates"),
        ((["ab"], [[]]), {}, ArgumentValueError, "`references` got none for candidate 0"),
        ((["ab"], [3]), {}, ArgumentTypeError, "`references` got a int"),
        (([3], ["ab"]), {}, ArgumentTypeError, "`candidates` got a int at 0"),
        ((["ab"], ["ab"]), {"layer": 3}, ArgumentValueError, r"`layers` got \[3\]"),
        ((["ab"], ["ab"]), {"baseline": (1, 0, 0)}, ArgumentValueError, "`baseline` got"),
    ],
)
def test_bad_arguments(texts, options, error, said, tokenizer):
    with pytest.raises(error, match=f"bert_score: {said}"):
        bert_score(*texts, pair("BertModel")[0], tokenizer, **options)
