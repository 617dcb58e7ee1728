from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
import transformers
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fastplm.models
from fastplm import _extension
from fastplm.cli import _parser, main
from fastplm.data import tokenize
from fastplm.errors import ArgumentValueError
from fastplm.pretrain import data as pretrain_data
from fastplm.pretrain import dry_run, report
from fastplm.pretrain import run as module
from fastplm.pretrain.report import numbers_of
from fastplm.pretrain.trainer import PretrainingTrainer
from fastplm.run.folder import last_checkpoint
from fastplm.testing import FORWARD_FACTOR, check_error, check_in_fp64

TEXT = ["The river follows the old house.", "A teacher opens. The train carries the letter away."]


def scalars(out, tag="train/loss"):
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def check_logged(out, loss):
    """Checks that a loss is that of the log, up to a rounding."""
    gold = torch.tensor(loss, dtype=torch.float64)
    check_error("loss", out, gold, [gold.float()], FORWARD_FACTOR)


# --- a run, and what it leaves behind -------------------------------------------------------------


def test_bert_run(bert):
    metrics = json.loads((bert / "metrics.json").read_text())
    history = metrics["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    for entry in history:
        assert entry["tokens_per_second"] > 0
        parts = torch.tensor([entry["mlm_loss"], entry["next_sentence_loss"]]).sum()
        check_logged(parts, entry["loss"])
    assert history[-1]["loss"] < history[0]["loss"]
    assert metrics["held_out"]["samples"] > 0
    assert metrics["arguments"]["arch"] == "bert-tiny"
    assert metrics["versions"]["torch"] == torch.__version__
    assert (bert / "loss.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in bert.iterdir()}
    assert {"checkpoint-4", "checkpoint-6", "model", "tokenizer", "tensorboard"} <= names
    assert not any(name.startswith(".") for name in names)
    logged = [value for _, value in scalars(bert)]
    assert torch.equal(torch.tensor(logged), torch.tensor([entry["loss"] for entry in history]))


def test_held_out_scores_are_logged(bert, electra):
    """The scores of metrics.json, also the nested ones, are logged at the last step."""
    for out, tag, of in (
        (bert, "mlm_loss", lambda held_out: held_out["mlm_loss"]),
        (electra, "words_recall", lambda held_out: held_out["words"]["recall"]),
    ):
        metrics = json.loads((out / "metrics.json").read_text())
        ((step, value),) = scalars(out, f"eval/{tag}")
        assert step == metrics["history"][-1]["step"]
        assert value == torch.tensor(of(metrics["held_out"])).item()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"arch": "gpt2-tiny", "vocab_size": 300}, marks=pytest.mark.slow),
        pytest.param({"arch": "electra-tiny"}, marks=pytest.mark.slow),
        {"arch": "electra-tiny", "two_stage": True, "electra_objective": "all_tokens_mlm"},
    ],
    ids=str,
)
def test_held_out_text_on_the_way_changes_nothing(options, run, tmp_path, curve):
    options = {**options, "dropout": 0.1, "attention_dropout": 0.1, "save_every": 4}
    plain, out = run(tmp_path / "plain", **options), tmp_path / "judged"
    judged = run(out, eval_every=2, **options)
    assert curve(judged) == curve(plain) and judged["held_out"] == plain["held_out"]
    by_step = judged["held_out_by_step"]
    assert [entry["step"] for entry in by_step] == [2, 4, 6]
    (last,) = plain["held_out_by_step"]
    assert by_step[-1] == last == {"step": 6, **numbers_of(plain["held_out"])}
    (loss,) = {"mlm_loss", "clm_loss"} & by_step[0].keys()
    losses = [entry[loss] for entry in by_step]
    assert losses == sorted(losses, reverse=True)  # also of a generator that is frozen at last
    assert scalars(out, f"eval/{loss}") == [
        (2 * place, torch.tensor(value).item()) for place, value in enumerate(losses, 1)
    ]
    shutil.rmtree(out / "checkpoint-6")
    assert run(out, resume=True, eval_every=2, **options)["held_out_by_step"] == by_step


def test_held_out_text_costs_no_draw_and_no_time_of_the_training(run, tmp_path, monkeypatch):
    held_out, evaluate = module.Pretraining.held_out, PretrainingTrainer.evaluate
    states = []

    def slow(self, *args):
        torch.rand(100)
        time.sleep(1)
        self.trainer.model.eval()
        return held_out(self, *args)

    def watched(self, **options):
        states.append(torch.get_rng_state())
        scores = evaluate(self, **options)
        states.append(torch.get_rng_state())
        assert self.model.training
        return scores

    monkeypatch.setattr(module.Pretraining, "held_out", slow)
    monkeypatch.setattr(PretrainingTrainer, "evaluate", watched)
    metrics = run(tmp_path / "out", eval_every=2)
    assert len(states) == 4 and all(map(torch.equal, states[::2], states[1::2]))
    assert metrics["train_seconds"] < 2


def test_the_picture_has_held_out_text(tmp_path, monkeypatch):
    """The loss over tokens stands beside a whole loss that has no parts, and by its name."""
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: shown.append(figure))
    history = [{"step": 1, "loss": 3.0}, {"step": 4, "loss": 2.0}]
    held_out = [{"step": 2, "clm_loss": 2.5, "unigram_loss": 4.0, "bigram_loss": 3.5}]
    assert report.plot_losses(tmp_path / "one.png", "", history, held_out, "clm_loss")
    history = [{**entry, "mlm_loss": 1.0, "rtd_loss": 0.5} for entry in history]
    held_out = [{"step": 4, "mlm_loss": 1.5, "unigram_loss": 4.0, "bigram_loss": 3.5}]
    assert report.plot_losses(tmp_path / "two.png", "", history, held_out, "mlm_loss")
    names = ["training", "held out", "held out, unigram", "held out, bigram"]
    for figure, panels in zip(shown, ([names], [names, names[:1]]), strict=True):
        lines = [axis.get_lines() for axis in figure.axes]
        assert [[line.get_label() for line in each] for each in lines] == panels
    assert shown[0].axes[0].get_lines()[1].get_xydata().tolist() == [[2.0, 2.5]]


def test_nothing_is_logged_where_nobody_asks(run, tmp_path):
    run(tmp_path / "out", steps=1, report_to="none")
    assert not (tmp_path / "out" / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "said"), [(None, True), (1e-4, False)])
def test_a_run_too_short_for_its_rate_says_so(run, lr, said, tmp_path, capsys):
    run(tmp_path / "out", steps=2, lr=lr)
    assert ("give --lr 0.001" in capsys.readouterr().err) == said


def test_why_nothing_is_held_out(run, arguments, refused, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text("\n\n".join(["The river follows the old house. " * 200] * 3))
    run(tmp_path / "out", steps=1, corpus=one)
    assert "1 document, of 2 that a sample takes" in capsys.readouterr().err
    words = arguments(tmp_path / "curve", steps=1, corpus=one, eval_every=1)
    refused(words, "eval_every", "too short to hold a part out")


def test_electra_run(electra):
    metrics = json.loads((electra / "metrics.json").read_text())
    first, last = metrics["history"][0], metrics["history"][-1]
    assert last["mlm_loss"] < first["mlm_loss"] and last["rtd_loss"] < first["rtd_loss"]
    assert {"replaced_precision", "replaced_recall", "balanced_accuracy"} <= set(
        metrics["held_out"]
    )
    assert 0.8 < metrics["held_out"]["accuracy_of_always_original"] < 0.95


@pytest.mark.parametrize(
    ("run_of", "folder", "kind", "outputs"),
    [
        ("bert", "model", "BertForPreTraining", ("prediction_logits", "seq_relationship_logits")),
        ("electra", "generator", "ElectraForMaskedLM", ("logits",)),
        ("electra", "discriminator", "ElectraForPreTraining", ("logits",)),
    ],
)
def test_loads_in_plain_transformers(run_of, folder, kind, outputs, request):
    path = request.getfixturevalue(run_of) / folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXT, padding=True, return_tensors="pt")
    tokens = batch["attention_mask"].bool()

    def shown(cls, dtype):
        """The outputs without those of padding, which are not defined."""
        model = cls.from_pretrained(path, dtype=dtype).eval()
        with torch.no_grad():
            results = model(**batch)
        every = {name: results[name] for name in outputs}
        return {
            name: value[tokens if value.shape[:2] == tokens.shape else slice(None)]
            for name, value in every.items()
        }

    plain = getattr(transformers, kind)
    out = shown(getattr(fastplm.models, kind), torch.float64)
    check_in_fp64(out, shown(plain, torch.float64), shown(plain, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "parts", "kind"),
    [
        (
            {"electra_objective": "rtd_masked", "electra_sharing": "all"},
            ["mlm_loss", "rtd_loss"],
            "ElectraForPreTraining",
        ),
        (
            {"electra_objective": "all_tokens_mlm"},
            ["discriminator_mlm_loss", "mlm_loss"],
            "ElectraForMaskedLM",
        ),
        ({"electra_generator": "unigram"}, ["rtd_loss"], "ElectraForPreTraining"),
        (
            {"adversarial": True, "generator_size": 0.5, "rtd_weight": 20.0},
            ["baseline_loss", "generator_loss", "mlm_loss", "rtd_loss"],
            "ElectraForPreTraining",
        ),
    ],
    ids=str,
)
def test_electra_options(run, tmp_path, options, parts, kind):
    out = tmp_path / "out"
    metrics = run(out, arch="electra-tiny", **options)
    recorded = json.loads((out / "run.json").read_text())
    assert {name: recorded[name] for name in options} == options
    for entry in metrics["history"]:
        assert sorted(name for name in entry if name.endswith("_loss")) == parts
    adversarial, learnt = "adversarial" in options, ["loss", *parts]
    if adversarial:  # the generator does not learn the tokens, but its loss is in the sum
        config = json.loads((out / "checkpoint-6" / "config.json").read_text())
        assert config["discriminator_weight"] == 20.0 and config["adversarial"]
        assert config["generator"]["hidden_size"] == config["discriminator"]["hidden_size"] / 2
        parts = learnt = ["rtd_loss"]
    for name in learnt:
        assert metrics["history"][-1][name] < metrics["history"][0][name]
        assert name == "loss" or 0 < metrics["held_out"][name] < 2 * metrics["history"][0][name]
    assert ("words" in metrics["held_out"]) == ("rtd_loss" in parts)
    assert (out / "generator").is_dir() == ("mlm_loss" in parts or adversarial)
    config = json.loads((out / "discriminator" / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert getattr(transformers, kind).from_pretrained(out / "discriminator")


def test_counts_of_a_unigram_generator(bert, arguments):
    settings = vars(_parser().parse_args(arguments(bert)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert / "tokenizer")
    store = tokenize(pretrain_data.open_corpus(settings["corpus"]), tokenizer, settings["cache"])
    counts = pretrain_data.count_tokens(store, tokenizer)
    tokens = torch.from_numpy(store.tokens.astype("int64"))
    for token in range(len(tokenizer)):
        special = token in tokenizer.all_special_ids
        assert counts[token] == (0 if special else (tokens == token).sum())


@pytest.mark.slow
def test_two_stages(run, tmp_path):
    out = tmp_path / "out"
    options = {"arch": "electra-tiny", "two_stage": True, "steps": 9, "log_every": 3, "warmup": 2}
    options["save_every"] = 9
    metrics = run(out, **options)
    history = metrics["history"]
    # The generator has four steps, and the last ends a window of the log; the discriminator has
    # five.
    assert [entry["step"] for entry in history] == [1, 3, 4, 6, 9]
    assert ["rtd_loss" in entry for entry in history] == [False, False, False, True, True]
    assert history[2]["mlm_loss"] < history[0]["mlm_loss"]
    assert history[4]["rtd_loss"] < history[3]["rtd_loss"]
    for entry in history:  # each has one of the two losses, without its weight of 50
        part = torch.tensor(entry.get("rtd_loss", entry["mlm_loss"]))
        check_logged(part, entry["loss"])
    # The rate goes up in two steps and down to the end, twice.
    factors = [0.0, 1.0, 1 / 2, 1 / 2, 1 / 3]
    assert [entry["learning_rate"] for entry in history] == [1e-3 * factor for factor in factors]
    assert json.loads((out / "run.json").read_text())["two_stage"] is True
    assert transformers.ElectraForPreTraining.from_pretrained(out / "discriminator")


@pytest.mark.slow
def test_without_pairs_and_with_a_given_tokenizer(run, bert, tmp_path, capsys):
    metrics = run(
        tmp_path / "out",
        no_nsp=True,
        vocab_size=None,
        tokenizer=bert / "tokenizer",
        workers=2,
        steps=2,
    )
    assert "next_sentence_loss" not in metrics["history"][0]
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "out" / "model")
    captured = capsys.readouterr()
    assert "step 2/2" in captured.err and "tokens/s" in captured.err
    assert str(tmp_path / "out" / "model") in captured.out


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "bert-tiny"},
        pytest.param({"arch": "t5-tiny", "vocab_size": 200}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_and_resumed_gives_the_same_curve(options, run, arguments, killed, tmp_path, curve):
    # Dropout needs the random state, too; there is one thread, as in the killed process.
    options |= {"dropout": 0.1, "attention_dropout": 0.1, "steps": 12, "save_every": 5}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run(whole, **options)
        killed(arguments(parts, **options), 8)
        assert last_checkpoint(parts) == parts / "checkpoint-5"
        assert not (parts / "metrics.json").exists()
        # TensorBoard orders the files of a run by the second in which they began.
        time.sleep(1)
        run(parts, resume=True, **options)
    finally:
        torch.set_num_threads(threads)
    assert curve(parts) == curve(whole)
    assert scalars(parts) == scalars(whole)


# The run resumes from the last checkpoint of the first stage, or from one of the second.
@pytest.mark.slow
@pytest.mark.parametrize(("steps", "at", "stage"), [(8, 4, 1), (9, 6, 2)])
def test_two_stages_resumed_give_the_same_curve(run, tmp_path, steps, at, stage, curve):
    options = {"arch": "electra-tiny", "two_stage": True, "steps": steps, "save_every": at}
    out = tmp_path / "out"
    whole = curve(run(out, **options))
    config = json.loads((out / f"checkpoint-{at}" / "config.json").read_text())
    assert config["stage"] == stage
    shutil.rmtree(out / f"checkpoint-{steps}")
    assert curve(run(out, resume=True, **options)) == whole


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param({"arch": arch}, marks=pytest.mark.slow)
            for arch in ("bert-tiny", "albert-tiny", "electra-tiny")
        ),
        pytest.param({"arch": "electra-tiny", "two_stage": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_are_one_with_twice_the_batch(
    options, run, arguments, in_two_processes, tmp_path, monkeypatch
):
    options = {**options, "dropout": 0, "steps": 4, "save_every": 100}
    one = run(tmp_path / "one", batch_size=8, **options)
    accumulated = run(tmp_path / "accumulated", gradient_accumulation=2, **options)
    in_two_processes(arguments(tmp_path / "two", **options))
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert two["processes"] == 2
    make_model = module.make_model
    monkeypatch.setattr(module, "make_model", lambda *args: make_model(*args).double())
    exact = run(tmp_path / "exact", batch_size=8, **options)
    names = [name for name in one["history"][0] if name.endswith("loss")]
    curves = [
        torch.tensor([[entry[name] for name in names] for entry in metrics["history"]])
        for metrics in (exact, two, one, accumulated)
    ]
    gold, out, *bases = (curve.double() / curves[0] for curve in curves)
    assert out.shape == (4, len(names))
    check_error("losses", out.float(), gold, [base.float() for base in bases], FORWARD_FACTOR)


ARCHS = ("bert", "roberta", "albert", "electra", "gpt", "gpt2", "bart", "t5")


@pytest.mark.slow
@pytest.mark.skipif(_extension.lacks("dropout_rows", "CPU") is not None, reason="no csrc/")
@pytest.mark.parametrize(
    "arch",
    [pytest.param(f"{arch}-tiny", marks=[pytest.mark.slow] * (arch != "albert")) for arch in ARCHS],
)
def test_dropout_does_not_depend_on_the_batch(
    arch, run, arguments, in_two_processes, tmp_path, request
):
    """The losses of one batch, of accumulated batches and of two processes differ by rounding."""
    options = {"arch": arch, "steps": 2, "dropout": 0.1, "save_every": 100}
    if arch != "t5-tiny":
        options["attention_dropout"] = 0.1
    if arch not in ("bert-tiny", "albert-tiny", "electra-tiny"):
        options["vocab_size"] = 300

    def losses(metrics):
        history = metrics["history"]
        names = [name for name in history[0] if name.endswith("loss")]
        return torch.tensor([[entry[name] for name in names] for entry in history])

    one = losses(run(tmp_path / "one", batch_size=8, **options))
    runs = []
    for count in (2, 4):
        parts = {"batch_size": 8 // count, "gradient_accumulation": count}
        runs.append(run(tmp_path / f"{count} parts", **parts, **options))
    if request.node.get_closest_marker("slow"):
        in_two_processes(arguments(tmp_path / "two", **options))
        runs.append(json.loads((tmp_path / "two" / "metrics.json").read_text()))
    for metrics in runs:
        torch.testing.assert_close(losses(metrics), one, rtol=1e-5, atol=1e-6)
    other = losses(run(tmp_path / "other", batch_size=8, **options | {"dropout": 0.11}))
    assert ((other - one).abs() > 1e-4 * one)[0].any(), "dropout is seen in these digits"


# --- bad input ------------------------------------------------------------------------------------

#: The name of a text, further options of a BERT, and words of the line that refuses them.
REFUSED = [
    (None, {"corpus": "nowhere.txt"}, "nowhere.txt", "not exist"),
    ("\n \n", {}, "text.txt", "empty"),
    (None, {"batch_size": 10**9}, "--batch-size", "65536"),
    (None, {"threads": 10**5}, "--threads", "1024"),
    (None, {"corpus": ""}, "`corpus` got ''"),
    (None, {"corpus": "zero\0byte"}, "`corpus`", "null byte"),
    ("two words.\n\nand three more.", {}, "tokens of one block"),
    ("two words.\n\nand three more.", {"no_nsp": True}, "tokens of one block"),
    ("= One =\n" + "\n".join([" ".join(TEXT)] * 50), {}, "--no-nsp"),
    (None, {"vocab_size": None, "tokenizer": "."}, "`directory`", "tokenizer"),
    (None, {"warmup": 99}, "warmup", "0 to 6"),
    (None, {"lr": 0}, "--lr", "above 0"),
    (None, {"dropout": 1.0}, "--dropout", "below 1"),
    (None, {"vocab_size": 8}, "vocab_size", "alphabet"),
    (None, {"precision": "fp64"}, "--precision", "bf16"),
    (None, {"objective": "rtd"}, "rtd with bert-tiny", "mlm+nsp or mlm"),
    (None, {"objective": "mlm", "no_nsp": True}, "no-nsp", "not allowed"),
    (None, {"electra_objective": "replace_mlm"}, "electra_objective", "bert-tiny"),
    (None, {"electra_sharing": "all"}, "electra_sharing", "bert-tiny"),
    (None, {"two_stage": True}, "two_stage", "bert-tiny"),
    (None, {"arch": "gpt2-tiny", "no_nsp": True}, "mlm with gpt2-tiny", "clm"),
    (None, {"arch": "t5-tiny", "objective": "denoise"}, "denoise with t5-tiny", "spans"),
    (None, {"arch": "t5-tiny", "unit": "word"}, "word with --objective spans"),
    (None, {"arch": "t5-tiny", "attention_dropout": 0.3}, "attention_dropout", "one rate"),
    (None, {"arch": "albert-tiny", "unit": "letter"}, "--unit", "ngram"),
    (None, {"arch": "albert-tiny", "optimizer": "sgd"}, "--optimizer", "lamb"),
    (None, {"arch": "bart-tiny", "vocab_size": 99}, "vocab_size", "got 99"),
]
REFUSED += [
    (None, {"arch": "electra-tiny", **options}, *words)
    for options, *words in (
        ({"electra_objective": "mlm"}, "electra-objective", "rtd_masked"),
        ({"electra_sharing": "some"}, "electra-sharing", "embeddings"),
        ({"electra_generator": "bigram"}, "electra-generator", "unigram"),
        ({"two_stage": True, "electra_generator": "unigram"}, "electra_generator", "two-stage"),
        ({"two_stage": True, "electra_sharing": "embeddings"}, "electra_sharing", "two-stage"),
        ({"two_stage": True, "steps": 1}, "steps", "2 or more"),
        ({"two_stage": True, "steps": 8, "warmup": 5}, "warmup", "0 to 4"),
    )
]


def test_links_in_a_circle(arguments, refused, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")
    refused(arguments(tmp_path / "out"), "`out`", "loop")


def test_a_step_that_was_too_large_leaves_no_model(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", lr=1e30, warmup=0, steps=1, save_every=100)
    refused(words, "of held-out text is not finite", "lower learning rate", code=3)
    assert not (tmp_path / "out" / "model").exists()


def test_the_documentation_is_a_corpus_of_its_own(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", corpus="embedded")
    words.insert(words.index("embedded") + 1, "text.txt")
    refused(words, "`corpus` got embedded text.txt; expected files, or embedded alone")


@pytest.mark.parametrize("text, options, words", [(a, b, c) for a, b, *c in REFUSED], ids=str)
def test_refused(text, options, words, arguments, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "text.txt").write_text(text)
        options = {"corpus": "text.txt", **options}
    refused(arguments(tmp_path / "out", **options), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "run_of, changed, words",
    [
        ("bert", {"seed": 3}, ["`seed` got 3; expected 0"]),
        ("bert", {"batch_size": 3}, ["`batch_size`"]),
        ("bert", {"objective": "mlm"}, ["`objective` got mlm"]),
        ("bert", {"unit": "word"}, ["`unit` got word"]),
        ("bert", {"optimizer": "lamb"}, ["`optimizer` got lamb"]),
        ("electra", {"electra_objective": "rtd_masked"}, ["electra_objective", "expected rtd,"]),
    ],
    ids=str,
)
def test_a_run_goes_on_with_its_own_settings(run_of, changed, words, arguments, refused, request):
    options = {"arch": f"{run_of}-tiny", "resume": True, **changed}
    refused(arguments(request.getfixturevalue(run_of), **options), *words)


def test_a_tokenizer_without_what_an_objective_needs(arguments, refused, bert, tmp_path):
    options = {"arch": "t5-tiny", "vocab_size": None, "tokenizer": bert / "tokenizer"}
    refused(arguments(tmp_path / "out", **options), "without a eos_token")


# --- what a run would cost ------------------------------------------------------------------------


@pytest.fixture
def few_steps(monkeypatch):
    """Three steps are timed, even if they are short."""
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)


@pytest.mark.slow
def test_dry_run(arguments, corpus, tmp_path, capfd, monkeypatch, run):
    out, cache = tmp_path / "out", tmp_path / "cache"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    assert main(arguments(out, cache=cache, steps=7, dry_run=True)) == 0
    shown = capfd.readouterr()
    rows = {line.split("  ")[0]: line for line in shown.out.splitlines()}
    assert not out.exists() and not cache.exists() and not any((tmp_path / "scratch").iterdir())
    assert "Warning" not in shown.err
    # The run itself prints the same figures.
    monkeypatch.undo()
    metrics = run(out, steps=7)
    announced = capfd.readouterr().err
    assert rows["model"] in announced and rows["vocabulary"] in announced.replace(" (found", "\n")
    assert f"{metrics['parameters']:,} parameters" in rows["model"]
    assert "6,264 tokens" in rows["corpus"] and "6,264 tokens" in announced
    assert "7 steps of 128 tokens (4 samples): 896 tokens" in rows["training"]
    assert f"{metrics['flops_per_token'] * 896:.3g}" in rows["FLOPs"]
    # A pair has fewer tokens than a block.
    assert 0 < metrics["flops"] <= metrics["flops_per_token"] * 896
    for name in ("memory", "speed", "time", "learning rate", "device", "precision"):
        assert name in rows


def test_a_dry_run_counts_bytes(arguments, tmp_path, few_steps):
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", dry_run=True)))
    settings.pop("command")
    figures = dry_run.dry_run(module.PretrainArguments(**settings))
    weights = 4 * figures["parameters"]
    assert figures["weights_bytes"] == weights
    # Two moments of each weight, and the steps of AdamW.
    assert 2 * weights <= figures["optimizer_bytes"] < 2.1 * weights
    assert figures["micro_batch_bytes"] > weights  # it includes the gradients
    assert figures["seconds"] == 6 * figures["seconds_per_step"]


@pytest.mark.slow
def test_a_dry_run_reads_the_beginning(arguments, tmp_path, monkeypatch, few_steps):
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", dry_run=True)))
    settings.pop("command")
    args = module.PretrainArguments(**settings).plan()
    whole = dry_run.dry_run(args)
    monkeypatch.setattr(dry_run, "_LETTERS", 10_000)
    part = dry_run.dry_run(args)
    assert "estimated from the first 10," in part["rows"]["corpus"]
    assert "estimated" not in whole["rows"]["corpus"]
    assert abs(part["corpus_tokens"] - whole["corpus_tokens"]) < 0.05 * whole["corpus_tokens"]


@pytest.mark.slow
def test_a_dry_run_times_both_stages(arguments, tmp_path, monkeypatch, few_steps):
    options = {"arch": "electra-tiny", "two_stage": True, "dry_run": True, "steps": 10}
    settings = vars(_parser().parse_args(arguments(tmp_path / "out", **options)))
    settings.pop("command")
    seconds, rehearse, stages = [], module.rehearse, []

    def recorded(*args, **kwargs):
        found = rehearse(*args, **kwargs)
        seconds.append(found.seconds)
        stages.append(found.trainer.model.config.stage)
        return found

    monkeypatch.setattr(module, "rehearse", recorded)
    figures = dry_run.dry_run(module.PretrainArguments(**settings))
    assert stages == [1, 2]
    assert figures["seconds"] == pytest.approx(10 * sum(seconds) / 2)
    with pytest.raises(ArgumentValueError, match="dry_run"):
        module.pretrain(module.PretrainArguments(**settings))
    # The moments belong to one of two equal encoders, with its head.
    assert figures["optimizer_bytes"] < 1.5 * figures["weights_bytes"]


def test_a_dry_run_neither_resumes_nor_overwrites(arguments, tmp_path, refused):
    for option in ("resume", "overwrite"):
        refused(arguments(tmp_path / "out", dry_run=True, **{option: True}), "dry_run", option)


# --- options that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"parameter_sharing": "none"}, ["parameter_sharing", "albert", "bert-tiny"]),
        ({"embedding_size": 64}, ["embedding_size", "electra", "bert-tiny"]),
        ({"noise": "token_masking"}, ["noise", "bart", "bert-tiny"]),
        ({"adversarial": True}, ["adversarial", "electra", "bert-tiny"]),
        ({"rtd_weight": 3}, ["rtd_weight", "electra", "bert-tiny"]),
        ({"static_masks": 10}, ["static_masks", "objective mlm+nsp"]),
        ({"heads": 3}, ["heads", "hidden", "128"]),
        ({"hidden": 100, "heads": 8}, ["heads", "hidden", "100"]),
        (
            {"arch": "electra-tiny", "objective": "mlm", "rtd_weight": 3},
            ["rtd_weight", "objective mlm"],
        ),
        (
            {"arch": "electra-tiny", "objective": "mlm", "two_stage": True},
            ["two_stage", "objective mlm"],
        ),
        (
            {"arch": "electra-tiny", "adversarial": True, "electra_generator": "unigram"},
            ["adversarial", "--electra-generator unigram"],
        ),
        (
            {"arch": "electra-tiny", "adversarial": True, "electra_objective": "replace_mlm"},
            ["adversarial", "--electra-objective replace_mlm"],
        ),
        (
            {"arch": "electra-tiny", "adversarial": True, "two_stage": True},
            ["adversarial", "two_stage"],
        ),
        (
            {"arch": "electra-tiny", "generator_size": 0.5, "electra_generator": "unigram"},
            ["generator_size", "--electra-generator unigram"],
        ),
        (
            {"arch": "electra-tiny", "generator_size": 0.5, "electra_sharing": "all"},
            ["generator_size", "--electra-sharing all"],
        ),
        (
            {"arch": "electra-tiny", "generator_size": 0.5, "two_stage": True},
            ["generator_size", "--two-stage", "second-stage-from"],
        ),
        (
            {"arch": "electra-tiny", "second_stage_from": "scratch"},
            ["second_stage_from", "two_stage"],
        ),
        (
            {"arch": "electra-tiny", "rtd_weight": 3, "two_stage": True},
            ["rtd_weight", "two_stage"],
        ),
        (
            {"arch": "electra-tiny", "optimizer": "adafactor", "two_stage": True},
            ["optimizer", "adafactor", "two-stage"],
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit(arguments, tmp_path, refused, options, names):
    refused(arguments(tmp_path / "out", **options), *names)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_second_stage_from_scratch_may_have_a_narrow_generator(run, tmp_path):
    out = tmp_path / "out"
    options = {"two_stage": True, "second_stage_from": "scratch", "generator_size": 0.5}
    metrics = run(out, arch="electra-tiny", steps=4, **options)
    assert metrics["history"][-1].keys() & {"mlm_loss", "rtd_loss"} == {"mlm_loss", "rtd_loss"}
    sizes = [
        json.loads((out / part / "config.json").read_text())["hidden_size"]
        for part in ("generator", "discriminator")
    ]
    assert sizes == [64, 128]
    # The first stage has only the generator, the second its forward and the discriminator.
    assert metrics["flops"] > 0
