"""Entities, and texts with several right answers: by hand, and as the usual packages score them."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers

from fastplm.data import train_tokenizer
from fastplm.data.examples import read_examples
from fastplm.errors import DataError
from fastplm.finetune.run import FinetuneArguments, finetune, prepare_task
from fastplm.finetune.scores import entities, entity_scores, mark_entities, text_scores


def test_entities_by_hand():
    tags = "B-PER I-PER O I-LOC B-LOC I-PER I-PER B-PER".split()
    found = {("PER", 0, 1), ("LOC", 3, 3), ("LOC", 4, 4), ("PER", 5, 6), ("PER", 7, 7)}
    assert entities(tags) == found
    assert entities("S-A B-A E-A I-A O".split()) == {("A", 0, 0), ("A", 1, 2), ("A", 3, 3)}
    assert entities([]) == entities(["O", "O"]) == set()


def test_entity_scores_by_hand():
    """Two entities are said and three are true; one has the right kind and both ends."""
    right = ["B-PER I-PER O B-LOC".split(), "B-LOC O".split()]
    found = ["B-PER I-PER O B-PER".split(), "O O".split()]
    scores = {"f1": 2 / 5, "precision": 1 / 2, "recall": 1 / 3}
    assert entity_scores(found, right) == pytest.approx(scores)
    nothing = [["O"] * len(tags) for tags in right]
    assert entity_scores(nothing, right) == dict.fromkeys(scores, 0.0)
    assert entity_scores(nothing, nothing) == dict.fromkeys(scores, 0.0)


def test_entity_scores_are_those_of_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    draw = random.Random(0)
    tags = ["O", "O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]
    for names in (tags, [tag for tag in tags if tag[0] in "OBI"]):
        right = [[draw.choice(names) for _ in range(1 + i % 9)] for i in range(200)]
        said = [[t if draw.random() < 0.8 else draw.choice(names) for t in each] for each in right]
        found = entity_scores(said, right)
        for name in ("f1", "precision", "recall"):
            theirs = getattr(metrics, f"{name}_score")(right, said)
            assert found[name] == pytest.approx(theirs) and 0.2 < theirs < 0.9


def test_which_tags_mark_entities():
    assert mark_entities(["B-PER", "I-PER", "O"]) and mark_entities(["S-X"])
    for tags in (["O"], ["NOUN", "O"], ["B", "I", "O"], ["B-PER", "I-PER", "O", "-X-"]):
        assert not mark_entities(tags)


def test_a_tagger_of_entities(tmp_path):
    """The first score is F1 of entities; a word without a token is outside of all."""
    words = "anna sees bern and carl sees oslo".split()
    tags = "B-PER O B-LOC O B-PER O B-LOC".split()
    sentences = ["\n".join(f"{w}\t{t}" for w, t in zip(words, tags, strict=True))] * 20
    data = tmp_path / "tags.tsv"
    data.write_text("\n\n".join(sentences))
    tokenizer = train_tokenizer([" ".join(words)] * 9, 60, tmp_path / "cache")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(tokenizer), intermediate_size=32, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    args = FinetuneArguments(
        task="tagging", model=tmp_path / "bert", data=data, out=tmp_path / "out", steps=1
    ).plan()
    metrics = finetune(args)
    assert metrics["main_score"] == "f1" and metrics["most_frequent_label"] is None
    assert [*metrics["scores"]] == ["f1", "precision", "recall", "accuracy"]
    assert metrics["chance"] == 0.0
    task = prepare_task(args)
    examples = task.test[:1]
    _, notes = task.features(examples)
    logits = torch.zeros(20, len(task.names))
    for _, word, place in notes[0]:
        logits[place, task.ids[tags[word]]] = 1.0
    notes[0] = [note for note in notes[0] if note[1] != 2]  # "bern" has no prediction
    scores, predictions = task.score(examples, notes, [(logits,)])
    # Three of four entities were said, all of them right.
    assert scores == pytest.approx(
        {"f1": 6 / 7, "precision": 1.0, "recall": 3 / 4, "accuracy": 6 / 7}
    )
    assert predictions[0][2] is None


# --- texts ----------------------------------------------------------------------------------------

WRITTEN = ["the cat sat on the mats", "a dog runs far away today", "nothing"]
RIGHT = [
    ("a cat sat on a mat", "the cat sat on the mat"),
    ("a dog runs far away today",),
    ("something else", "nothing", "no word"),
]


def test_texts_with_several_references():
    """As the packages score them: sacreBLEU with streams of references, ROUGE's best reference."""
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    found = text_scores(WRITTEN, RIGHT)
    streams = [
        [right[0] for right in RIGHT],
        [right[1] if len(right) > 1 else None for right in RIGHT],
        [None, None, RIGHT[2][2]],
    ]
    assert found["bleu"] == sacrebleu.BLEU().corpus_score(WRITTEN, streams).score
    assert found["chrf"] == sacrebleu.CHRF().corpus_score(WRITTEN, streams).score
    assert found["exact_match"] == pytest.approx(200 / 3)
    for stemmer in (False, True):
        rouge = scorer.RougeScorer(["rouge1", "rougeLsum"], use_stemmer=stemmer)
        scores = text_scores(WRITTEN, RIGHT, stemmer=stemmer)
        for name in ("rouge1", "rougeLsum"):
            best = [
                max(rouge.score(each, text)[name].fmeasure for each in right)
                for text, right in zip(WRITTEN, RIGHT, strict=True)
            ]
            assert scores[name] == pytest.approx(100 * sum(best) / 3)
    # "mats" and "mat" have one stem.
    assert scores["rouge1"] == pytest.approx(100) and found["rouge1"] < 99
    first = text_scores(WRITTEN, [right[:1] for right in RIGHT])
    assert first["bleu"] < found["bleu"] and first["exact_match"] == pytest.approx(100 / 3)


def test_several_targets_in_files(tmp_path):
    (tmp_path / "table.jsonl").write_text(
        '{"source": "a", "target": ["b", " c "]}\n{"source": "d", "target": "e"}\n'
    )
    for name, text in (("x", "a\nd\n"), ("y", "b\ne\n"), ("z", "c\nf\n")):
        (tmp_path / name).write_text(text)
    found = read_examples("seq2seq", tmp_path / "table.jsonl")
    assert [(e.target, e.others) for e in found] == [("b", ("c",)), ("e", ())]
    found = read_examples("seq2seq", tmp_path / "x", targets=[tmp_path / "y", tmp_path / "z"])
    assert [(e.target, e.others) for e in found] == [("b", ("c",)), ("e", ("f",))]
    for wrong, said in (
        ("[]", "an empty list"),
        ('["a", 3]', "the int 3"),
        ('["a", ""]', "nothing"),
    ):
        (tmp_path / "table.jsonl").write_text(f'{{"source": "a", "target": {wrong}}}')
        with pytest.raises(DataError, match=f":1: {said}.* in column 'target'"):
            read_examples("seq2seq", tmp_path / "table.jsonl")
    (tmp_path / "z").write_text("c\n")
    with pytest.raises(DataError, match="z:2: no such line; expected as many lines as .*x and .*z"):
        read_examples("seq2seq", tmp_path / "x", targets=[tmp_path / "y", tmp_path / "z"])


def test_a_run_with_several_targets(tmp_path):
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    sources = [
        f"the {a} {b}" for a in ("big", "red") for b in ("cat", "dog", "man", "hill", "road")
    ]
    tokenizer = train_tokenizer(sources, 130, tmp_path / "cache", "unigram")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    for name, lines in (("train", sources), ("test", sources[:4])):
        (tmp_path / name).write_text("\n".join(lines))
        for number in (1, 2):
            (tmp_path / f"{name}.{number}").write_text("\n".join(f"{x} {number}" for x in lines))
    metrics = finetune(
        FinetuneArguments(
            task="seq2seq",
            model=tmp_path / "t5",
            data=tmp_path / "train",
            targets=tmp_path / "train.1",
            eval_data=tmp_path / "test",
            eval_targets=[tmp_path / "test.1", tmp_path / "test.2"],
            stemmer=True,
            steps=1,
            max_target_length=8,
            beams=1,
            out=tmp_path / "out",
        )
    )
    assert metrics["scores"].keys() >= {"bleu", "rouge1", "exact_match"}
    found = json.loads((tmp_path / "out" / "seed-0" / "predictions.json").read_text())
    labels = [record["label"] for record in found["predictions"]]
    assert labels == [[f"{source} 1", f"{source} 2"] for source in sources[:4]]
