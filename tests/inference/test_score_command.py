"""``fastplm score``: files in, tables and JSON out, and one line for each error."""

from __future__ import annotations

import gzip
import json
import math
import re

import pytest
import torch

from fastplm import models
from fastplm.cli import main
from fastplm.data.minimal_pairs import read_pairs
from fastplm.inference import score_command
from fastplm.inference.bertscore import bert_score
from fastplm.inference.minimal_pairs import minimal_pairs
from fastplm.inference.score import log_likelihood, perplexity, pseudo_log_likelihood
from fastplm.models.electra_joint import ElectraJointConfig

from .conftest import loaded, rows_of, saved

TEXTS = ["the lazy dogs jump", "a", "dogs over foxes"]
FOLDERS = {
    "bert": models.BertForMaskedLM,
    "gpt2": models.GPT2LMHeadModel,
    "t5": models.T5ForConditionalGeneration,
    "electra": models.ElectraForPreTraining,
}
PAIRS = [
    {"sentence_good": "the dogs jump", "sentence_bad": "the dogs jumps", "UID": "sv"},
    {"sentence_good": "a fox", "sentence_bad": "foxes a", "UID": "order"},
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, made):
    """Folders ``headless`` and those of ``FOLDERS``, each a model and its tokenizer."""
    out = tmp_path_factory.mktemp("checkpoints")
    for name, kind in FOLDERS.items():
        model, _, tokenizer = made(kind.__name__)
        saved(out / name, model, tokenizer)
        if name == "bert":
            saved(out / "headless", model.bert, tokenizer)
    return out


@pytest.fixture
def data(tmp_path):
    """The texts, with a blank line before the last one."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join([*TEXTS[:2], "", TEXTS[2]]) + "\n", encoding="utf-8")
    return path


def json_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def pairs(tmp_path):
    """A file of minimal pairs."""
    terms = ({"linguistics_term": term, "field": "syntax"} for term in ("agreement", "order"))
    rows = [row | of for row, of in zip(PAIRS, terms, strict=True)]
    return json_lines(tmp_path / "pairs.jsonl", rows)


@pytest.fixture
def score(checkpoints, capsys):
    """Runs the command for the model in a folder; returns what it printed on both streams."""

    def run(model, data, *options):
        capsys.readouterr()
        words = ["score", "--model", checkpoints / model, "--data", data, *options]
        assert main([str(word) for word in words]) == 0
        shown = capsys.readouterr()
        run.said = shown.err
        return shown.out

    return run


@pytest.fixture
def refused(checkpoints, capsys):
    """The command ends with exit code 2 and one line of an error that says so."""

    def run(model, data, *options, said):
        capsys.readouterr()
        words = ["score", "--model", checkpoints / model, "--data", data, *options]
        try:
            code = main([str(word) for word in words])
        except SystemExit as exit:  # argparse raises it
            code = exit.code
        shown = capsys.readouterr()
        *others, line = shown.err.splitlines()
        assert code == 2 and not shown.out, shown
        assert re.match("fastplm( score)?: error: ", line) and said in line, shown.err
        assert not any(line.startswith(("Traceback", "fastplm: error")) for line in others)

    return run


def _near(shown, value):
    return math.isclose(float(shown), value, rel_tol=1e-6)  # eight digits are shown


def test_a_masked_model_by_text_token_and_corpus(score, data, checkpoints):
    model, tokenizer = loaded(checkpoints / "bert", models.BertForMaskedLM)
    scores = pseudo_log_likelihood(model, tokenizer, TEXTS)
    rows = rows_of(score("bert", data))
    assert [row["line"] for row in rows] == ["1", "2", "4"]
    for row, known in zip(rows, scores, strict=True):
        assert int(row["tokens"]) == len(known.tokens)
        assert _near(row["pseudo_log_likelihood"], known.sum)
        assert _near(row["pseudo_perplexity"], known.perplexity)
    rows = rows_of(score("bert", data, "--by", "token"))
    tokens = [token for known in scores for token in known.tokens]
    values = torch.cat([known.log_probs for known in scores]).tolist()
    assert [row["token"] for row in rows] == tokens
    assert all(_near(row["log_prob"], value) for row, value in zip(rows, values, strict=True))
    (row,) = rows_of(score("bert", data, "--by", "corpus"))
    assert (row["texts"], row["tokens"]) == ("3", str(len(tokens)))
    assert _near(row["pseudo_perplexity"], perplexity(scores))
    (other,) = rows_of(score("bert", data, "--by", "corpus", "--method", "within_word_l2r"))
    expected = pseudo_log_likelihood(model, tokenizer, TEXTS, method="within_word_l2r")
    assert _near(other["pseudo_perplexity"], perplexity(expected))
    assert other["pseudo_perplexity"] != row["pseudo_perplexity"]


def test_json(score, data, checkpoints):
    model, tokenizer = loaded(checkpoints / "gpt2", models.GPT2LMHeadModel)
    scores = log_likelihood(model, tokenizer, TEXTS)
    found = json.loads(score("gpt2", data, "--format", "json", "--by", "token"))
    assert (found["metric"], found["corpus"]["texts"]) == ("log-likelihood", 3)
    for text, known, content in zip(found["texts"], scores, TEXTS, strict=True):
        assert text["text"] == content and "source" not in text
        assert [token["token"] for token in text["by_token"]] == known.tokens
        assert [token["log_prob"] for token in text["by_token"]] == known.log_probs.tolist()
        assert (text["log_likelihood"], text["perplexity"]) == (known.sum, known.perplexity)
    by_text = json.loads(score("gpt2", data, "--format", "json"))
    assert [text["tokens"] for text in by_text["texts"]] == [len(known.tokens) for known in scores]
    assert "texts" not in json.loads(score("gpt2", data, "--format", "json", "--by", "corpus"))
    # This tokenizer writes the token itself.
    bos = json.loads(score("gpt2", data, "--format", "json", "--bos"))
    assert bos["corpus"] == found["corpus"]


def test_pairs(score, tmp_path, checkpoints):
    model, tokenizer = loaded(checkpoints / "t5", models.T5ForConditionalGeneration)
    sources = ["jump", "dogs", "a"]
    path = tmp_path / "pairs.tsv.gz"
    pairs = zip(sources, TEXTS, strict=True)
    path.write_bytes(gzip.compress("".join(f"{a}\t{b}\n" for a, b in pairs).encode()))
    scores = log_likelihood(model, tokenizer, TEXTS, sources=sources)
    found = json.loads(score("t5", path, "--format", "json"))["texts"]
    assert [text["source"] for text in found] == sources
    assert [text["log_likelihood"] for text in found] == [known.sum for known in scores]
    assert [text["text"] for text in found] == TEXTS
    lone = tmp_path / "lone.txt"
    lone.write_text("\n".join(TEXTS))
    found = json.loads(score("t5", lone, "--format", "json"))["texts"]
    scores = log_likelihood(model, tokenizer, TEXTS)
    assert [text["log_likelihood"] for text in found] == [known.sum for known in scores]


def test_settings_change_what_they_say(score, data, monkeypatch):
    seen, real = [], score_command.pseudo_log_likelihood

    def look(*arguments, **options):
        seen.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))
        return real(*arguments, **options)

    monkeypatch.setattr(score_command, "pseudo_log_likelihood", look)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    plain = score("bert", data)
    for options, error in (
        (("--batch-tokens", 7, "--threads", 1), 1e-4),
        (("--matmul-precision", "high"), 1e-5),
        (("--bf16",), 0.05),
    ):
        shown = score("bert", data, *options)
        assert (shown != plain) >= (options == ("--bf16",))
        for row, other in zip(rows_of(plain), rows_of(shown), strict=True):
            values = (float(each["pseudo_log_likelihood"]) for each in (row, other))
            assert math.isclose(*values, rel_tol=error)
    assert seen == [before, (1, "highest"), (before[0], "high"), before]
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


def test_a_file_is_written_whole_and_never_replaced(score, data, tmp_path, refused):
    out = tmp_path / "scores.tsv"
    shown = score("bert", data)
    assert score("bert", data, "--out", out) == "" and out.read_text() == shown
    refused("bert", data, "--out", out, said="scores.tsv, which exists")
    assert out.read_text() == shown
    assert score("bert", data, "--out", out, "--by", "corpus", "--overwrite") == ""
    assert out.read_text() != shown and out.with_name(f"{out.name}.old-1").read_text() == shown
    refused("bert", data, "--out", tmp_path / "none" / "a.tsv", said="a file in an existing folder")
    (tmp_path / "folder").mkdir()
    refused("bert", data, "--out", tmp_path / "folder", said="which exists")
    (tmp_path / "folder").rmdir()
    assert {path.name for path in tmp_path.iterdir()} == {
        out.name,
        f"{out.name}.old-1",
        "texts.txt",
    }


def test_what_is_wrong_is_said_in_one_line(refused, data, tmp_path):
    files = {
        "empty": "",
        "blank": "\n \n",
        "long": "dogs\n" + "dogs " * 80,
        "tabs": "a\tb\na\tb\tc\n",
        "mixed": "a\tb\na\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for model, name, options, said in (
        ("bert", "empty", "", "empty, a file without text"),
        ("bert", "blank", "", "blank, a file without text"),
        ("bert", "none.txt", "", "none.txt, a path that does not exist"),
        ("bert", ".", "", f"{tmp_path}, a folder; "),
        ("bert", ".", "", "Name a file in it."),
        ("none", data, "", "none (no such file or folder); expected a checkpoint with its conf"),
        ("headless", data, "", "lacks 6 weights of a BertForMaskedLM, such as cls.predictions"),
        ("bert", "long", "", "text 1, 'dogs dogs"),
        ("bert", data, "--metric log-likelihood", "expected pseudo-log-likelihood"),
        ("gpt2", data, "--metric pseudo-log-likelihood", "expected log-likelihood"),
        ("gpt2", data, "--method original", "`method` got original"),
        ("bert", data, "--bos", "`bos`"),
        ("bert", data, "--method l2r", "--method: got 'l2r'; expected original"),
        ("bert", data, "--by word", "--by: got 'word'; expected token | text | corpus"),
        ("bert", data, "--batch-tokens 0", "--batch-tokens: got '0'"),
        ("t5", "tabs", "", "tabs:2: 2 tabs"),
        ("t5", "mixed", "", "mixed:2: 0 tabs"),
        ("bert", data, "--metric bertscore", "Give --references FILE"),
        ("bert", data, "--metric bertscore --references DATA --by token", "text or corpus"),
        ("bert", data, "--metric bertscore --references DATA --bos", "nothing with bertscore"),
        ("bert", data, "--references DATA", "or give --metric bertscore"),
        ("bert", data, "--idf", "or give --metric bertscore"),
        ("bert", data, "--metric bertscore --references mixed", "a file of 2 lines; expected 4"),
    ):
        places = {"DATA": data, "mixed": tmp_path / "mixed"}
        given = [places.get(word, word) for word in options.split()]
        refused(model, tmp_path / name, *given, said=said)


def test_no_mask_token(refused, data, checkpoints, tmp_path):
    model, tokenizer = loaded(checkpoints / "bert", models.BertForMaskedLM)
    tokenizer.mask_token = None
    folder = saved(tmp_path / "model", model, tokenizer)
    refused(folder, data, said="a tokenizer without a mask_token")


def test_texts_that_are_cut_are_counted(score, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("dogs\n" + "dogs " * 80)
    shown = score("bert", path, "--truncate")
    assert "texts longer than the model takes, cut: 1 of 2" in score.said
    assert int(rows_of(shown)[1]["tokens"]) == 62


def test_texts_that_an_encoder_decoder_fills_in(score, checkpoints, tmp_path):
    """The tabs of a file of texts part no sources."""
    texts = tmp_path / "texts.txt"
    texts.write_text("the lazy\tdogs\n")
    options = ("--metric", "pseudo-log-likelihood", "--method", "within_word_l2r")
    (row,) = json.loads(score("t5", texts, "--format", "json", *options))["texts"]
    model = loaded(checkpoints / "t5", FOLDERS["t5"])
    (known,) = pseudo_log_likelihood(*model, ["the lazy\tdogs"], method="within_word_l2r")
    assert row["pseudo_log_likelihood"] == pytest.approx(known.sum, rel=1e-6)


# --- BERTScore ------------------------------------------------------------------------------------


@pytest.fixture
def references(tmp_path):
    """Two files of references, line by line those of ``data``."""
    paths = [tmp_path / name for name in ("first.txt", "second.txt")]
    for path, texts in zip(paths, (TEXTS[::-1], TEXTS), strict=True):
        path.write_text("\n".join([*texts[:2], "never read", texts[2]]), encoding="utf-8")
    return paths


@pytest.mark.parametrize("model", ["bert", "headless", "t5"])
def test_bertscore(model, score, data, references, checkpoints):
    options = ("--metric", "bertscore", "--layer", 1, "--idf", "--references")
    rows = rows_of(score(model, data, *options, *references))
    assert [row["line"] for row in rows] == ["1", "2", "4"]
    encoder, tokenizer = loaded(checkpoints / model, models.AutoModel)
    both = list(zip(TEXTS[::-1], TEXTS, strict=True))
    known = bert_score(TEXTS, both, encoder, tokenizer, idf=True, layer=1)
    for name, values in known._asdict().items():
        assert all(
            _near(row[name], value) for row, value in zip(rows, values.tolist(), strict=True)
        )
    (row,) = rows_of(score(model, data, "--by", "corpus", *options, references[0]))
    alone = bert_score(TEXTS, TEXTS[::-1], encoder, tokenizer, idf=True, layer=1)
    assert _near(row["f1"], alone.f1.mean().item())
    assert not torch.equal(alone.f1, known.f1)


def test_a_table_is_scored_as_its_texts_are(score, data, references, tmp_path):
    """Its rows are not numbered without gaps, and one has no text; tabs part sources."""
    rows = [json.dumps({"text": text}) for text in (*TEXTS[:2], None, TEXTS[2])]
    table = tmp_path / "texts[0-9].jsonl"
    table.write_text("\n".join([rows[0], "", *rows[1:]]))
    for options in ((), ("--metric", "bertscore", "--references", references[0])):
        lines, found = (
            rows_of(score("bert", data, *options)),
            rows_of(score("bert", table, *options)),
        )
        assert "left out: 1" in score.said
        assert [row.pop("line") for row in lines] == ["1", "2", "4"]
        assert [row.pop("line") for row in found] == ["1", "3", "5"]
        assert found == lines
    sources = tmp_path / "sources.tsv"
    sources.write_text("a\tdogs over\nfoxes\tjump\n")
    assert len(rows_of(score("t5", sources))) == 2


# --- minimal pairs --------------------------------------------------------------------------------

OF_PAIRS = ("--metric", "minimal-pairs")


@pytest.fixture
def published(tmp_path):
    rows = [{"UID": "sv", "lstm": 0.7}, {"UID": "order", "lstm": 0.6}]
    return json_lines(tmp_path / "published.jsonl", rows)


@pytest.mark.parametrize("name", ["bert", "electra", "t5"])
def test_minimal_pairs(name, score, pairs, published, checkpoints):
    model = loaded(checkpoints / name, FOLDERS[name])
    scores = minimal_pairs(*model, read_pairs(pairs))
    rows = rows_of(score(name, pairs, *OF_PAIRS, "--published", published))
    assert f"by {scores.scorer}; published: lstm 0.650" in score.said
    for row, known in zip(rows, scores.accuracies(), strict=True):
        assert (row["level"], row["name"], row["pairs"]) == (*known[:2], str(known.pairs))
        numbers = [float(row[name]) for name in ("accuracy", "low", "high")]
        assert numbers == pytest.approx(known[5:], rel=1e-6)
    assert [row["lstm"] for row in rows][:3] == ["0.65", "0.65", "0.7"]
    found = json.loads(score(name, pairs, *OF_PAIRS, "--by", "pair", "--format", "json"))
    assert [pair["good"] for pair in found["pairs"]] == scores.good.tolist()
    assert [bool(pair["correct"]) for pair in found["pairs"]] == scores.correct.tolist()
    assert found["scorer"] == scores.scorer and len(found["accuracies"]) == len(rows)
    assert len(rows_of(score(name, pairs, *OF_PAIRS, "--by", "corpus"))) == 1


@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_a_checkpoint_of_two_models(part, score, refused, pairs, made, tmp_path):
    """ELECTRA's pre-training saves generator and discriminator in one."""
    discriminator, _, tokenizer = made("ElectraForPreTraining")
    config = ElectraJointConfig.from_discriminator(discriminator.config, generator_size=0.5)
    joint = models.ElectraForJointPreTraining(config)
    folder = saved(tmp_path / "joint", joint, tokenizer)
    options = (*OF_PAIRS, "--part", part, "--by", "pair", "--format", "json")
    found = json.loads(score(folder, pairs, *options))["pairs"]
    known = minimal_pairs(getattr(joint, part).eval(), tokenizer, read_pairs(pairs))
    assert [pair["good"] for pair in found] == pytest.approx(known.good.tolist(), rel=1e-5)
    options = ("--metric", "log-likelihood", "--part", part)
    refused("bert", pairs, *options, said="`part` got")


def test_options_of_minimal_pairs(score, pairs, checkpoints):
    options = (*OF_PAIRS, "--by", "pair", "--normalize", "--method", "within_word_l2r")
    row = rows_of(score("bert", pairs, *options, "--threads", 1))[0]
    assert re.search(r"device +cpu, 1 thread\n|device +cuda", score.said)
    texts = [row["sentence_good"], row["sentence_bad"]]
    model = loaded(checkpoints / "bert", FOLDERS["bert"])
    known = pseudo_log_likelihood(*model, texts, method="within_word_l2r")
    means = [score.sum / len(score.tokens) for score in known]
    assert [float(row["good"]), float(row["bad"])] == pytest.approx(means, rel=1e-5)


def test_some_pairs_of_each_paradigm(score, pairs):
    """The same ones every time, in the order of the file, with the scores that they have in it."""
    longer = [
        (row, " ".join([row["sentence_good"], *["dogs"] * i])) for i in range(4) for row in PAIRS
    ]
    json_lines(pairs, [row | {"sentence_good": text} for row, text in longer])
    found = []
    for options in ((), ("--max-pairs", 2), ("--max-pairs", 2), ("--max-pairs", 9)):
        rows = rows_of(score("electra", pairs, *OF_PAIRS, "--by", "pair", *options))
        found.append({(row["paradigm"], row["sentence_good"]): float(row["good"]) for row in rows})
    every, some, again, most = found
    assert len(every) == 8 and every == most and some == again
    assert [paradigm for paradigm, _ in some].count("sv") == len(some) - 2 == 2
    assert list(some) == [row for row in every if row in some]
    assert some == pytest.approx({row: every[row] for row in some}, rel=1e-5)


def test_a_picture_beside_the_table(score, refused, pairs, published, tmp_path):
    out, picture = tmp_path / "found.tsv", tmp_path / "found.png"
    options = (*OF_PAIRS, "--out", out, "--picture", "--published", published)
    score("electra", pairs, *options)
    assert picture.read_bytes().startswith(b"\x89PNG") and out.read_text().startswith("level\t")
    assert f"drawn as {picture}" in score.said
    out.unlink()
    refused("electra", pairs, *options, said="found.png, which exists")
    assert not out.exists()
    score("electra", pairs, *options, "--overwrite")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--by text", "`by` got text; expected corpus | pair | paradigm"),
        ("--metric log-likelihood --by pair", "`by` got pair; expected token | text | corpus"),
        ("--metric log-likelihood --normalize", "`normalize` got True; expected nothing with"),
        ("--metric pseudo-log-likelihood --method empty_source", "`method` got empty_source"),
        ("--bos", "`bos` got True"),
        ("--picture", "--out FILE with another ending"),
        ("--picture --out a.png", "--out FILE with another ending"),
        ("--method empty_source", "expected original | within_word_l2r"),
        ("--published OTHER", "with no UID of"),
        ("--published TAKEN", "with a column accuracy, ties; expected a column for each system"),
        ("--metric log-likelihood --max-pairs 3", "`max_pairs` got 3; expected nothing with"),
        ("--part generator", "a checkpoint of one model"),
        ("--no-bos", "`no_bos` got True; expected false with a BertForMaskedLM"),
        ("--idf", "`idf` got True; expected nothing with another metric"),
    ],
)
def test_wrong_options_of_minimal_pairs(words, said, refused, pairs, tmp_path):
    rows = {
        "OTHER": {"UID": "none", "lstm": 0.5},
        "TAKEN": {"UID": "sv", "accuracy": 0.9, "ties": 0},
    }
    files = {name: json_lines(tmp_path / name, [row]) for name, row in rows.items()}
    refused("bert", pairs, *OF_PAIRS, *(files.get(w, w) for w in words.split()), said=said)


def test_a_model_that_gives_nan(refused, pairs, made, tmp_path):
    model, _, tokenizer = made("ElectraForPreTraining")
    for weight in model.discriminator_predictions.dense_prediction.parameters():
        torch.nn.init.constant_(weight, 3e38)
    folder = saved(tmp_path / "electra", model, tokenizer)
    refused(folder, pairs, *OF_PAIRS, said="gives NaN or infinity")
