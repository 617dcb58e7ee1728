"""What the scripts of plateaus say of a run."""

from __future__ import annotations

import math

import electra_plateau
import pytest


def test_a_discriminator_has_learned_where_it_stays_above():
    """A gain of the first steps, which goes away again, is none."""
    assert electra_plateau.learned([(10, 0.07), (20, 0.03), (30, 0.06), (40, 0.2)]) == 30
    assert electra_plateau.learned([(10, 0.2), (20, 0.05)]) is None


def test_the_best_constant_answer_gains_nothing():
    constant = -(0.15 * math.log(0.15) + 0.85 * math.log(0.85))
    logged = {"accuracy_of_always_original": 0.85}
    history = [{"step": step, "rtd_loss": constant, **logged} for step in range(1, 11)]
    assert electra_plateau.gains(history) == [(5, pytest.approx(0)), (10, pytest.approx(0))]
    half = [{"step": 1, "rtd_loss": constant / 2, **logged}]
    assert electra_plateau.gains(half) == [(1, pytest.approx(0.5))]
