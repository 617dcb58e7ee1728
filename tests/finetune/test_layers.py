"""The rate of each layer."""

from __future__ import annotations

import pytest

from fastplm.errors import ArgumentValueError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.layers import layer_depths
from fastplm.finetune.models import build_model
from fastplm.finetune.run import finetune
from fastplm.finetune.trainer import make_trainer

#: With two layers and a decay of 0.5: a weight of each part, and its share of the rate.
RATES = {
    "bert": {
        "bert.embeddings.word_embeddings.weight": 1 / 16,
        "bert.embeddings.LayerNorm.bias": 1 / 16,
        "bert.encoder.layer.0.attention.self.query.weight": 1 / 8,
        "bert.encoder.layer.1.output.dense.bias": 1 / 4,
        "bert.pooler.dense.weight": 1 / 2,
        "classifier.weight": 1,
    },
    "roberta": {
        "roberta.embeddings.position_embeddings.weight": 1 / 16,
        "roberta.encoder.layer.0.output.LayerNorm.weight": 1 / 8,
        "roberta.encoder.layer.1.intermediate.dense.weight": 1 / 4,
        "classifier.dense.weight": 1,
        "classifier.out_proj.bias": 1,
    },
    "electra": {
        "electra.embeddings.token_type_embeddings.weight": 1 / 16,
        "electra.embeddings_project.weight": 1 / 16,
        "electra.encoder.layer.0.attention.output.dense.weight": 1 / 8,
        "electra.encoder.layer.1.attention.output.dense.weight": 1 / 4,
        "classifier.dense.weight": 1,
        "classifier.out_proj.weight": 1,
    },
    "gpt2": {
        "transformer.wte.weight": 1 / 16,
        "transformer.wpe.weight": 1 / 16,
        "transformer.h.0.attn.c_attn.weight": 1 / 8,
        "transformer.h.1.mlp.c_proj.bias": 1 / 4,
        "transformer.ln_f.weight": 1 / 2,
        "score.weight": 1,
    },
}


@pytest.mark.parametrize(
    "model, library", [*((model, "fastplm") for model in RATES), ("bert", "transformers")]
)
def test_rates_by_layer(model, library, arguments, tmp_path):
    options = {"layer_decay": 0.5, "library": library, "learning_rate": 0.02, "warmup": 0}
    task = prepare_task(arguments("classification", model, steps=2, **options))
    trainer = make_trainer(task, build_model(task, 0), 0, tmp_path)
    trainer.train()
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    groups = trainer.optimizer.param_groups
    found = {names[id(w)]: group["initial_lr"] for group in groups for w in group["params"]}
    assert found.keys() == {*names.values()}
    assert {name: found[name] / 0.02 for name in RATES[model]} == pytest.approx(RATES[model])
    decays = {names[id(w)]: group["weight_decay"] for group in groups for w in group["params"]}
    assert {decays[name] for name in names.values() if name.endswith("bias")} == {0.0}
    # What is logged is the rate of the head; all fall to 0 together.
    rates = [e["learning_rate"] for e in trainer.state.log_history if "loss" in e]
    assert rates == [0.02, 0.01]
    assert [group["lr"] for group in groups] == [0.0] * len(groups)


def test_a_run_with_rates_by_layer(arguments):
    """Without a decay nothing changes, and a feature-based head is above all layers."""
    plain = finetune(arguments("classification", out="plain"))["seeds"][0]
    one = finetune(arguments("classification", out="one", layer_decay=1.0))["seeds"][0]
    less = finetune(arguments("classification", out="less", layer_decay=0.5))["seeds"][0]
    losses = [[entry["loss"] for entry in run["history"]] for run in (plain, one, less)]
    assert losses[0] == losses[1] != losses[2] and losses[0][0] == losses[2][0]
    args = arguments("classification", features="mix", pooling="mean", layer_decay=0.5)
    depths = layer_depths(build_model(prepare_task(args), 0))
    assert depths["mix.weight"] == depths["classifier.weight"] == 4
    assert depths["encoder.encoder.layer.1.output.dense.weight"] == 2
    with pytest.raises(ArgumentValueError, match="`layer_decay` got 0.5 with .*, a albert; expect"):
        prepare_task(arguments("classification", "albert", layer_decay=0.5))
