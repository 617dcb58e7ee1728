"""What every run over text does: its logs, scores, budgets, checkpoints, and how it is resumed."""

from __future__ import annotations

import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
import transformers

import fastplm.models
from fastplm import data
from fastplm.pretrain import evaluate as evaluation
from fastplm.pretrain import stream
from fastplm.pretrain.objectives import OBJECTIVES
from fastplm.pretrain.report import numbers_of
from fastplm.pretrain.trainer import PretrainingTrainer
from fastplm.run import trainer
from fastplm.run.flops import flops_a_token
from fastplm.run.folder import last_checkpoint, read_hashed, write_hashed

from .conftest import flops_of, scalars


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
    scores, evaluate = evaluation.evaluate, PretrainingTrainer.evaluate
    states, clock = [], SimpleNamespace(now=0.0)

    def slow(model, *args):
        torch.rand(100)
        clock.now += 100
        model.eval()
        return scores(model, *args)

    def watched(self, **options):
        states.append(torch.get_rng_state())
        scores = evaluate(self, **options)
        states.append(torch.get_rng_state())
        assert self.model.training
        return scores

    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(evaluation, "evaluate", slow)
    monkeypatch.setattr(PretrainingTrainer, "evaluate", watched)
    metrics = run(tmp_path / "out", eval_every=2)
    assert len(states) == 4 and all(map(torch.equal, states[::2], states[1::2]))
    assert metrics["train_seconds"] < 1


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


def test_a_step_that_was_too_large_leaves_no_model(arguments, refused, tmp_path):
    words = arguments(tmp_path / "out", lr=1e30, warmup=0, steps=1, save_every=100)
    refused(words, "of held-out text is not finite", "lower learning rate", code=3)
    assert not (tmp_path / "out" / "model").exists()


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


@pytest.mark.parametrize("operator", ["mask_tokens", "corrupt_spans", "bart_noise"])
def test_a_gpu_without_cuda_code_leaves_the_noise_to_the_workers(monkeypatch, operator):
    """The reference would run in loops over tokens on the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = {"CPU": None, "CUDA": None}
    monkeypatch.setattr(stream._extension, "lacks", lambda op, key: missing[key])
    collator = SimpleNamespace(op=operator, needs_cpu=False)
    assert stream.corrupts_on_device(collator)
    missing["CUDA"] = "the CUDA code was not built"
    assert not stream.corrupts_on_device(collator)
    collator.op = None  # there is no noise to make
    assert stream.corrupts_on_device(collator)
    collator.needs_cpu = True
    assert not stream.corrupts_on_device(collator)
    kinds = {getattr(data, kind.collator_class).op for kind in OBJECTIVES}
    assert kinds == {"mask_tokens", "corrupt_spans", "bart_noise", None}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["t5-tiny", "albert-tiny"])
def test_workers_and_the_device_do_not_matter(short_run, tmp_path, monkeypatch, arch, curve):
    """The place where samples are corrupted: this process, two workers, or the trainer as on a
    GPU."""
    options = {"steps": 4, "save_every": 100, "gradient_accumulation": 2}
    whole = short_run(tmp_path / "whole", arch, **options)
    workers = short_run(tmp_path / "workers", arch, workers=2, **options)
    monkeypatch.setattr(stream, "corrupts_on_device", lambda collator: True)
    corrupted, corrupt = [], PretrainingTrainer._corrupted

    def counted(self, batch):
        assert "labels" not in batch
        corrupted.append(corrupt(self, batch))
        return corrupted[-1]

    monkeypatch.setattr(PretrainingTrainer, "_corrupted", counted)
    device = short_run(tmp_path / "device", arch, workers=2, **options)
    assert len(corrupted) == 8
    assert curve(workers) == curve(device) == curve(whole)
    assert workers["held_out"] == device["held_out"] == whole["held_out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("bart-tiny", {}),
        ("albert-tiny", {"optimizer": "lamb"}),
        ("t5-tiny", {"optimizer": "adafactor", "warmup": 2}),
        ("gpt-tiny", {"hidden": 96, "heads": 3}),
        ("roberta-tiny", {"static_masks": 3, "unit": "word"}),
        # From the last checkpoint of the first stage, and from one of the second.
        ("electra-tiny", {"two_stage": True, "steps": 8, "save_every": 4}),
        ("electra-tiny", {"two_stage": True, "steps": 9, "save_every": 6}),
    ],
    ids=str,
)
def test_resumed_gives_the_same_curve(short_run, tmp_path, arch, options, curve):
    out, options = tmp_path / "out", {"steps": 6, "save_every": 3, **options}
    whole = short_run(out, arch, **options)
    shutil.rmtree(out / f"checkpoint-{options['steps']}")
    if "two_stage" in options:
        at = options["save_every"]
        config = json.loads((out / f"checkpoint-{at}" / "config.json").read_text())
        assert config["stage"] == (1 if at == options["steps"] / 2 else 2)
    assert curve(short_run(out, arch, resume=True, **options)) == curve(whole)
    if options.get("optimizer") == "adafactor":
        rates = [entry["learning_rate"] / 1e-3 for entry in whole["history"]]
        assert rates == pytest.approx([1, 1, *((2 / n) ** 0.5 for n in (3, 4, 5, 6))])


def test_a_budget_says_how_many_steps(run, tmp_path, bert, capsys):
    a_step = flops_of(json.loads((bert / "metrics.json").read_text()), bert)
    out = tmp_path / "out"
    metrics = run(out, steps=None, flops=3.99 * a_step, save_every=2)
    assert metrics["history"][-1]["step"] == metrics["arguments"]["steps"] == 3
    assert metrics["arguments"]["flops"] == 3.99 * a_step
    said = capsys.readouterr().err
    assert f"budget         {3.99 * a_step:.4g} FLOPs pay for 3 steps of {a_step:.4g}" in said
    assert said.index("budget") < said.index("step 1/3")
    assert "flops: " in (out / "settings.yaml").read_text()
    record = read_hashed(out / "run.json")
    assert (record["steps"], record["flops"]) == (3, 3.99 * a_step)
    # With a larger budget the run becomes longer, and a smaller one does not reach its steps.
    more = run(out, steps=None, flops=5 * a_step, resume=True)
    assert more["history"][-1]["step"] == 5 and more["starts"] == [0, 3]


def test_a_budget_of_two_stages(run, tmp_path, electra):
    sizes = {"arch": "electra-tiny", "two_stage": True}
    joint = transformers.ElectraConfig.from_pretrained(electra / "discriminator")
    config = fastplm.models.ElectraJointConfig.from_discriminator(
        joint, generator_size=1.0, embedding_sharing="none", stage=1
    )
    a_step = 4 * 32 * flops_a_token(config, 32)
    metrics = run(tmp_path / "out", steps=None, flops=5 * a_step, **sizes)
    assert metrics["history"][-1]["step"] == 4  # as many of each stage
    assert metrics["flops"] <= 5 * a_step


def test_all_checkpoints_are_kept(run, tmp_path, capsys):
    out = tmp_path / "out"
    run(out, keep_checkpoints="all", report_to="none")
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (2, 4, 6)
    ]
    assert "a checkpoint each 2 steps, of which all are kept" in capsys.readouterr().err
    assert not (out / "tensorboard").exists()


def test_milestones_are_kept_for_a_curve(run, tmp_path, capsys):
    """They are at equal distances, and stay beside the newest ones, also in a resumed run."""
    out = tmp_path / "out"
    options = {"steps": 10, "states": 3, "save_every": 2, "keep_checkpoints": 1}
    run(out, **options)
    assert "of which the last 1 are kept" in capsys.readouterr().err
    there = sorted(path.name for path in out.glob("checkpoint-*"))
    assert there == ["checkpoint-10", "checkpoint-3", "checkpoint-7"]
    shutil.rmtree(out / "checkpoint-10")
    (out / "manifest.json").unlink()
    run(out, resume=True, **options)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == there
    # A run of twice the steps has other states.
    run(out, resume=True, **options | {"steps": 20})
    there = sorted(int(path.name[11:]) for path in out.glob("checkpoint-*"))
    assert there == [7, 13, 20]


def test_a_run_of_before_these_settings_is_resumed(run, arguments, refused, tmp_path):
    out = tmp_path / "out"
    run(out, steps=2)
    later = "flops seeds keep_checkpoints temperature separators start_from mlm_probability "
    later += "mask_replace_prob random_replace_prob"
    record = read_hashed(out / "run.json")
    write_hashed(out / "run.json", {n: record[n] for n in record if n not in later.split()})
    (out / "manifest.json").unlink()
    refused(arguments(out, steps=4, resume=True, mlm_probability=0.3), "`mlm_probability` got 0.3")
    assert run(out, steps=4, resume=True)["starts"] == [0, 2]
