"""Model cards: their metadata as the Hub reads it, their code and command, and whose they are."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import transformers
from huggingface_hub import ModelCard, ModelCardData

from fastplm import models
from fastplm.cli import _parser, main
from fastplm.finetune.settings import FinetuneArguments
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run.card import command_of, write_card
from fastplm.run.config_file import read

REVISION = "0" * 40


def metadata(folder):
    """The metadata of a card, which are the same when the Hub's own class has read them."""
    data = ModelCard.load(folder / "README.md").data
    assert ModelCardData(**data.to_dict()).to_dict() == data.to_dict()
    return data


def test_the_card_of_a_pre_training(bert):
    """Its figures, its code, which runs, and its command, which gives the same settings."""
    metrics = json.loads((bert / "metrics.json").read_text())
    data, text = metadata(bert / "model"), (bert / "model" / "README.md").read_text()
    assert data.library_name == "transformers" and data.tags == ["fastplm", "pretrain"]
    assert data.base_model is None and data.datasets is None and data.language is None
    scores = {result.metric_type: result.metric_value for result in data.eval_results}
    assert scores["mlm_loss"] == metrics["held_out"]["mlm_loss"] and "samples" not in scores
    assert all(result.dataset_name.startswith("the last ") for result in data.eval_results)
    steps = metrics["arguments"]["steps"]
    assert f"from random weights, with the objective `{metrics['arguments']['objective']}`" in text
    assert f"tokens): {steps} steps of " in text and f"{metrics['parameters']:,} parameters" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    exec(code.replace("path/to/this/folder", str(bert / "model")), names)
    assert isinstance(names["model"], models.BertForPreTraining)
    assert len(names["tokenizer"]) == metrics["vocab_size"]
    (command,) = re.findall(r"```sh\n(.*?)\n```", text, re.S)
    given = vars(_parser().parse_args(shlex.split(command)[1:]))
    given.pop("command")
    settings = read("pretrain", str(bert / "settings.yaml"))
    asked = PretrainArguments(**given).given
    assert {name: str(asked[name]) for name in settings if name != "corpus"} == {
        name: str(value) for name, value in settings.items() if name != "corpus"
    }


@pytest.mark.parametrize(("folder", "task"), [("generator", "fill-mask"), ("discriminator", None)])
def test_each_model_of_electra_has_a_card(electra, folder, task):
    data = metadata(electra / folder)
    assert data.pipeline_tag == task
    assert data.model_name.endswith(f"/{folder}")


@pytest.fixture
def small(tmp_path):
    """What ``write_card`` gets for a small model; gives the folder."""
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = models.BertForSequenceClassification(config)
    # As the cache of the Hub has it.
    base = tmp_path / "models--some--bert" / "snapshots" / REVISION
    file = "hf:some/set/part:train"
    args = FinetuneArguments(
        task="classification",
        model=base,
        data=file,
        out=tmp_path / "out",
        learning_rate=[1e-4, 2e-4],
    )

    def write(**changes):
        given = dict(
            trained="Trained on little.",
            data=[file],
            base=base,
            scores={"accuracy": 0.5},
            scored="4 examples",
            facts={"loss": 0.25, "a|b": "c|d\n"},
        )
        write_card(tmp_path, args.plan(), model, **given | changes)
        return tmp_path

    return write


def test_names_of_the_hub(small):
    folder = small()
    data, text = metadata(folder), (folder / "README.md").read_text()
    assert data.base_model == "some/bert" and data.datasets == ["some/set"]
    assert data.pipeline_tag == "text-classification"
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_type) == ("text-classification", "some/set")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5)
    assert "| accuracy | 0.5 |" in text and "| a|b | c\\|d  |" in text
    local = metadata(small(base=folder, data=["a.tsv"], scores={}))
    assert local.base_model is None and local.datasets is None and local.eval_results is None


def test_a_card_that_was_edited_stays(small, capsys):
    path = small() / "README.md"
    first = path.read_text()
    small(scores={"accuracy": 0.75})
    assert path.read_text() != first and "0.75" in path.read_text()
    for text in (
        path.read_text() + "More.\n",
        path.read_text().replace("0.75", "0.99"),
        "Mine.\n",
        "",
    ):
        path.write_text(text)
        small(scores={"accuracy": 0.25})
        assert path.read_text() == text
        assert f"{path} is not as a run wrote it, and stays." in capsys.readouterr().err


def test_a_resumed_run_writes_its_own_card_alone(arguments, tmp_path, capsys):
    """A card that was edited is no damage; that of a longer run is written anew."""
    out = tmp_path / "out"
    assert main(arguments(out, steps=2)) == 0
    path = out / "model" / "README.md"
    first = path.read_text()
    assert main(arguments(out, steps=3, resume=True)) == 0
    assert "3 steps" in path.read_text() and "2 steps" in first
    path.write_text("Mine.\n")
    capsys.readouterr()
    assert main(arguments(out, steps=3, resume=True)) == 0
    assert "nothing was changed" in capsys.readouterr().err
    assert main(arguments(out, steps=4, resume=True)) == 0
    assert path.read_text() == "Mine.\n" and (out / "model" / "config.json").is_file()


def test_a_command_of_lists_and_switches(tmp_path):
    args = FinetuneArguments(
        task="pair",
        model="a b",
        data="x",
        out=tmp_path,
        learning_rate=[1e-4, 2e-4],
        text_columns=["q", "a"],
        freeze=True,
        resume=True,
    )
    assert command_of(args.plan()) == (
        f"fastplm finetune --task pair --data x --out {tmp_path} --model 'a b' "
        "--text-columns q a --freeze --learning-rate 0.0001,0.0002"
    )
