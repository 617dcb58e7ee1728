"""lm-evaluation-harness with fastplm's models: its own model's answers, and our minimal pairs."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch

from fastplm.errors import ArgumentValueError, DataError, UnsupportedError
from fastplm.inference.minimal_pairs import minimal_pairs
from fastplm.testing import check_in_fp64

from .conftest import saved

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import CachingLM  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from fastplm.inference.lm_eval import FastplmLM  # noqa: E402

LONG = "the lazy foxes jump over the dogs " * 9
#: Contexts and continuations: with the same context, none, spaces at the border and too many
#: tokens; of one token and many; without a border between words; twice; letters of all kinds.
PAIRS = [
    *(("the lazy", " dogs"), ("the lazy", " fox"), ("the lazy ", "fox jumps"), ("do", "gs")),
    *(("", "a dog"), ("", "the lazy dogs jump"), ("", "the lazy dogs"), (LONG, " unbelievably")),
    *(
        ("\u00fcber \U0001f600 na\u00efve", " caf\u00e9 \u4e2d"),
        ("the lazy", " dogs"),
        ("x", "\n y"),
    ),
]
#: Minimal pairs of two paradigms, the first one of which is better by most models.
GOOD = ["the dogs jump", "a fox jumps", "lazy dogs jump", "the fox jumps", "a dog jumps over foxes"]
BAD = [
    "the dogs jumps",
    "a foxes jumps",
    "dogs lazy jump",
    "fox the jumps",
    "a dog jump over foxes",
]
#: Their file, and a task as the harness' own of BLiMP, but for where the data is.
TASK = """\
task: local_{name}
dataset_path: json
dataset_kwargs:
  data_files: {{train: {data}}}
  cache_dir: {cache}
output_type: multiple_choice
validation_split: train
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{{{[sentence_good, sentence_bad]}}}}"
target_delimiter: "{delimiter}"
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def asked(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.fixture
def both(made):
    """Our model of the harness and its own, of the same weights in one dtype."""
    model, parent, tokenizer = made("GPT2LMHeadModel")

    def build(dtype=torch.float64, **options):
        ours = FastplmLM(model.to(dtype), tokenizer, **options)
        theirs = HFLM(
            pretrained=copy.deepcopy(parent).to(dtype),
            tokenizer=copy.deepcopy(tokenizer),  # it is changed
            batch_size=3,
            prefix_token_id=ours.prefix_token_id,
            add_bos_token=False,
            max_length=ours.max_length,
        )
        return ours, theirs

    return build


def test_the_answers_of_its_own_model(both):
    requests = asked("loglikelihood", *PAIRS)
    texts = asked("loglikelihood_rolling", *[(text,) for text in ("", "a fox", LONG, "\u00fcber")])
    found = {}
    for dtype in (torch.float32, torch.float64):
        for whose, lm in zip(("ours", "theirs"), both(dtype, batch_tokens=90), strict=True):
            values, greedy = zip(*lm.loglikelihood(requests, disable_tqdm=True), strict=True)
            whole = lm.loglikelihood_rolling(texts, disable_tqdm=True)
            numbers = torch.tensor([*values, *whole], dtype=dtype)
            found[whose, dtype] = {"log-likelihoods": numbers}, greedy
    (ours, best), (gold, theirs) = found["ours", torch.float64], found["theirs", torch.float64]
    check_in_fp64(ours, gold, found["theirs", torch.float32][0])
    assert best == theirs
    assert len({*ours["log-likelihoods"].tolist()}) == len(PAIRS) - 1 + len(texts)  # one is twice


def test_what_it_generates_is_greedy(both):
    """The texts of its own model, whose tokens are then the most probable ones."""
    ours, theirs = both()
    until = {"until": ["q"], "max_gen_toks": 9}
    contexts = ["the lazy", "a dog jumps", "dogs lazy", LONG, ""]
    options = [until] * 4 + [until | {"max_new_tokens": 4}]
    requests = asked("generate_until", *zip(contexts[:4], options, strict=False))
    texts = ours.generate_until(requests, disable_tqdm=True)
    assert texts == theirs.generate_until(requests, disable_tqdm=True)
    assert any("q" not in text for text in texts)
    (text,) = ours.generate_until(asked("generate_until", ("", until)), disable_tqdm=True)
    assert ours.tok_encode(text)[:1]
    ids = ours.tok_encode("the lazy")
    with torch.no_grad():
        token = ours.model(torch.tensor([ids])).logits[0, -1].argmax().item()
    likely, other = ours._loglikelihood_tokens([(None, ids, [token]), (None, ids, [token - 1])])
    assert likely[1] and not other[1] and likely[0] > other[0]


@pytest.fixture
def task(tmp_path):
    """A folder of two tasks: the second one has the harness's space before each sentence."""
    data, folder = tmp_path / "pairs.jsonl", tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {"sentence_good": good, "sentence_bad": bad} for good, bad in zip(GOOD, BAD, strict=True)
    ]
    data.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    for name, delimiter in (("pairs", ""), ("spaced", " ")):
        facts = {"name": name, "delimiter": delimiter, "data": data, "cache": tmp_path / "cache"}
        (folder / f"{name}.yaml").write_text(TASK.format(**facts), "utf-8")
    return folder


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertLMHeadModel", "BertForMaskedLM"])
def test_minimal_pairs_in_the_harness(made, task, name):
    """The accuracy and the sums are those of ``fastplm score --metric minimal-pairs``."""
    model, _, tokenizer = made(name)
    found = lm_eval.simple_evaluate(
        FastplmLM(model, tokenizer),
        tasks=["local_pairs", "local_spaced"],
        task_manager=TaskManager(include_path=str(task), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    accuracies = []
    for name, space in (("local_pairs", ""), ("local_spaced", " ")):
        pairs = [(space + good, space + bad) for good, bad in zip(GOOD, BAD, strict=True)]
        scores = minimal_pairs(model, tokenizer, pairs)
        row = scores.accuracies()[0]
        assert row.ties == 0 and found["results"][name]["acc,none"] == row.accuracy
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        sums = [[float(value) for value, _ in each["filtered_resps"]] for each in samples]
        gold = torch.stack([scores.good, scores.bad], 1)
        torch.testing.assert_close(torch.tensor(sums), gold.float())
        accuracies.append(row.accuracy)
    assert any(0 < accuracy < 1 for accuracy in accuracies)


def test_a_masked_model_reads_the_context(made):
    """The tokens of a continuation are scored, given the context before and what is around it."""
    model, parent, tokenizer = made("BertForMaskedLM")
    lm = FastplmLM(model, tokenizer, max_length=12)
    ids = tokenizer("the lazy dogs")["input_ids"]
    count = len(ids) - len(tokenizer("the lazy")["input_ids"])
    copies = torch.tensor([ids] * count)
    places = range(len(ids) - 1 - count, len(ids) - 1)
    for row, place in zip(copies, places, strict=True):
        row[place] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = parent(copies).logits.log_softmax(-1)
    gold = sum(logits[row, place, ids[place]].item() for row, place in enumerate(places))
    answers = lm.loglikelihood(asked("loglikelihood", ("the lazy", " dogs"), (LONG, " dogs")))
    assert answers[0][0] == pytest.approx(gold, rel=1e-5)
    assert answers[1] != answers[0]  # the end of a context that was too long
    (whole,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", ("the lazy dogs",)))
    pairs = minimal_pairs(model, tokenizer, [("the lazy dogs", "a")])
    assert whole == pytest.approx(pairs.good.item(), rel=1e-5)
    with pytest.raises(UnsupportedError, match="a BertForMaskedLM; expected a decoder"):
        lm.generate_until(asked("generate_until", ("a", {"until": ["q"]})))


def test_the_harness_keeps_the_answers(both, tmp_path, monkeypatch):
    lm, _ = both()
    until = {"until": ["q"], "max_gen_toks": 4}
    calls = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [("a dog",), (LONG,)],
        "generate_until": [("a dog", until), ("the lazy", until)],
    }
    kept = CachingLM(lm, str(tmp_path / "answers.db"))
    first = {kind: getattr(lm, kind)(asked(kind, *calls[kind])) for kind in calls}  # add_partial
    kept.dbdict.commit()
    for kind in calls:
        monkeypatch.setattr(lm, kind, None)
    assert {kind: getattr(kept, kind)(asked(kind, *calls[kind])) for kind in calls} == first


def test_one_token_stands_before_a_text(both):
    """Also where the text has it."""
    ours, _ = both(add_bos_token=True)
    start = ours.prefix_token_id
    token, ids = ours.tokenizer.convert_ids_to_tokens(start), ours.tok_encode("a dog")
    assert ids[0] == start and ours.tok_encode(token + "a dog") == ids
    requests = asked("loglikelihood_rolling", ("a dog",), (token + "a dog",))
    one, other = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    assert one == other


@pytest.mark.slow  # it reads the list of all tasks
def test_the_command(made, task, tmp_path):
    model, _, tokenizer = made("GPT2LMHeadModel")
    folder = saved(tmp_path / "model", model, tokenizer)
    options = f"--model fastplm --model_args pretrained={folder} --tasks local_pairs"
    options += f" --include_path {task} --output_path {tmp_path / 'out'}"
    done = subprocess.run(
        [sys.executable, "-m", "fastplm.inference.lm_eval", "run", *options.split()],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("out/**/results_*.json")
    row = minimal_pairs(model, tokenizer, list(zip(GOOD, BAD, strict=True))).accuracies()[0]
    assert json.loads(path.read_text())["results"]["local_pairs"]["acc,none"] == row.accuracy


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("T5ForConditionalGeneration", {}, "`pretrained` got a T5For.*expected a decoder or a"),
        ("GPT2LMHeadModel", {"max_length": 65}, "`max_length` got 65; expected 3 to 64"),
        ("GPT2LMHeadModel", {"max_length": 0}, "`max_length` got 0"),
    ],
)
def test_what_it_refuses(made, name, options, message):
    model, _, tokenizer = made(name)
    with pytest.raises(ArgumentValueError, match=message):
        FastplmLM(model, tokenizer, **options)


def test_requests_that_cannot_be_answered(both):
    lm, _ = both()
    with pytest.raises(DataError, match="a continuation of .* tokens; expected 1 to 64"):
        lm.loglikelihood(asked("loglikelihood", ("a", LONG)))
    with pytest.raises(DataError, match="a continuation of 0 tokens"):
        lm.loglikelihood(asked("loglikelihood", ("a", "")))
    with pytest.raises(DataError, match="`max_gen_toks` got 256; expected 1 to 63"):
        lm.generate_until(asked("generate_until", ("a", {"until": ["q"]})))
