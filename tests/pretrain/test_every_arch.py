"""Every architecture and objective runs to its end: steps, evaluation, models, cards, picture."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fastplm.models
from fastplm.cli import main
from fastplm.models import ElectraForJointPreTraining
from fastplm.pretrain.objectives import JOINT_FAMILIES
from fastplm.pretrain.presets import FAMILIES, PRESETS, learned_by
from fastplm.pretrain.settings import PretrainArguments

from .conftest import VOCABULARIES

#: Sizes of a model that is made, trained and saved at once.
SMALLEST = {"layers": 1, "hidden": 16, "heads": 2, "steps": 2, "batch_size": 2, "block_size": 16}
SMALLEST |= {"save_every": 2, "threads": 1}
#: What some choices for ELECTRA's two models need beside them.
_BESIDE = {
    ("electra_sharing", "all"): {"generator_size": 1},
    ("second_stage_from", "scratch"): {"two_stage": True},
}


def _kinds(of):
    """The first architectures of each kind, which the others of it differ from in numbers alone."""
    return list({of(preset): arch for arch, preset in reversed(PRESETS.items())}.values())[::-1]


FIRST = _kinds(lambda preset: preset.family)


def _runs():
    """(architecture, settings): each objective of each, and each choice for a joint model."""
    kinds = _kinds(lambda preset: (preset.family, preset.optimizer, bool(preset.source)))
    for arch, preset in PRESETS.items():
        marks = () if arch in kinds else pytest.mark.slow
        for objective in learned_by(preset.family):
            yield pytest.param(arch, {"objective": objective}, marks=marks)
    for arch in FIRST:
        for name, field in PretrainArguments.__dataclass_fields__.items():
            of_both = PRESETS[arch].family in field.metadata["of"] == JOINT_FAMILIES
            choices = field.metadata["choices"] or ([True] if field.default is False else [])
            for choice in choices if of_both else ():
                if choice != field.default:
                    yield arch, {name: choice, **_BESIDE.get((name, choice), {})}


def to_its_end(run, out, arch, **options):
    """The metrics of a run of two steps of the smallest size, whose models load and are finite."""
    kind = FAMILIES[PRESETS[arch].family].tokenizer
    options = {**SMALLEST, "vocab_size": VOCABULARIES[kind], **options}
    metrics = run(out, arch=arch, **options)
    assert metrics["held_out"]["samples"] > 0 and metrics["picture"]
    assert metrics["history"][-1]["step"] == 2
    for name in metrics["models"]:
        names = {path.name for path in (out / name).iterdir()}
        assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
        weights = load_file(out / name / "model.safetensors")
        assert all(weight.isfinite().all() for weight in weights.values())
        config = transformers.AutoConfig.from_pretrained(out / name)
        # Models that Transformers has no class for are of our own.
        kind = getattr(fastplm.models, config.architectures[0], None)
        kind = kind or getattr(transformers, config.architectures[0])
        _, found = kind.from_pretrained(out / name, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"]
    return metrics


@pytest.mark.parametrize("arch, options", list(_runs()), ids=str)
def test_to_its_end(arch, options, run, tmp_path):
    to_its_end(run, tmp_path / "out", arch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FIRST)
def test_further_endings(arch, run, arguments, tmp_path, monkeypatch, capsys):
    """Scores between the steps, several seeds, a resumed run, and a dry run."""
    monkeypatch.setattr("fastplm.pretrain.trainer._TIMED_SECONDS", 0.0)
    kind = FAMILIES[PRESETS[arch].family].tokenizer
    options = {**SMALLEST, "arch": arch, "vocab_size": VOCABULARIES[kind]}
    for objective in learned_by(PRESETS[arch].family):
        out = tmp_path / objective
        of_one = options | {"objective": objective}
        assert main(arguments(out / "dry", **of_one, dry_run=True)) == 0 and not out.exists()
        metrics = run(out / "seeds", **of_one, seeds=2, eval_every=1)
        assert len(metrics["seeds"]) == 2 and metrics["held_out"]
        # A run is resumed after its last step, and made longer.
        seed = out / "seeds" / "seed-0"
        (seed / "manifest.json").unlink()
        again = of_one | {"resume": True, "eval_every": 1}
        found = run(seed, **again)
        assert found["history"][-1]["step"] == 2 and found["starts"] == [0, 2]
        assert run(seed, **again | {"steps": 3})["history"][-1]["step"] == 3
    capsys.readouterr()


@pytest.mark.parametrize("arch", JOINT_FAMILIES)
def test_the_models_that_are_saved_are_those_that_were_trained(arch, run, tmp_path):
    """With "gdes" the discriminator has the sum of two tables, which exists in no model."""
    out, options = tmp_path / "out", {"electra_sharing": "gdes", "lr": 0.1, "warmup": 0}
    to_its_end(run, out, f"{arch}-tiny", **options)
    joint = ElectraForJointPreTraining.from_pretrained(out / "checkpoint-2")
    whole = joint.whole_discriminator().state_dict()
    saved = load_file(out / "discriminator" / "model.safetensors")
    assert saved and all(torch.equal(whole[name], value) for name, value in saved.items())
    table = joint.discriminator.get_input_embeddings().weight
    assert table.any() and not torch.equal(whole_table(joint), table)


def whole_table(joint):
    return joint.whole_discriminator().get_input_embeddings().weight
