"""What the settings of a distillation may be together."""

from __future__ import annotations

import re

import pytest

from fastplm.distill.settings import METHODS, WEIGHTS, DistillArguments
from fastplm.errors import ArgumentValueError


def settings(recipe="distilbert", steps=9, **options):
    return DistillArguments(recipe, "teacher", ["text"], steps, "out", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "electra"}, "`generator` got nothing; .*Give --generator"),
        ({"recipe": "multilingual"}, "`translation` got nothing; .*Give --translation"),
        ({"attention_weight": 1.0}, "`attention_weight` got 1.0 with the recipe distilbert"),
        ({"hard_weight": 0, "soft_weight": 0, "hidden_weight": 0}, "`hard_weight` got 0"),
        ({"vocab_size": 99}, "`vocab_size` got 99 with the recipe distilbert"),
        ({"pooling": "cls"}, "`pooling` got cls with the recipe distilbert"),
        ({"recipe": "tinybert", "temperature": 3.0}, "`temperature` got 3.0 with the recipe"),
        ({"recipe": "minilm", "divergence": "js"}, "`divergence` got js with the recipe minilm"),
        ({"batch_size": 2**16, "gradient_accumulation": 2**16, "steps": 2**40}, "`batch_size` got"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(options, said):
    with pytest.raises(ArgumentValueError) as error:
        settings(**options)
    assert re.search(said, str(error.value))


@pytest.mark.parametrize("recipe", METHODS)
def test_rates_and_weights_are_the_published_ones(recipe):
    own = {"electra": {"generator": "g"}, "multilingual": {"translation": ["t"]}}
    plan = settings(recipe, **own.get(recipe, {})).plan()
    method = METHODS[recipe]
    assert plan.lr == method.learning_rate and plan.warmup == 0
    assert {name: getattr(plan, name) for name in WEIGHTS} == {
        name: method.weights.get(name) for name in WEIGHTS
    }
