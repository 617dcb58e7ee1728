"""What the script of the night says of its curve."""

from __future__ import annotations

import math

import night
import pytest


def test_more_hours_lie_on_a_line_through_the_second_half():
    line = {hours: 0.6 + 0.05 * math.log(hours) for hours in (1, 1.5, 2)}
    rows = [{"hours": hours, "accuracy": f"{level}"} for hours, level in line.items()]
    early, loss = {"hours": 0.5, "accuracy": "0.1"}, {"hours": 1.7, "accuracy": None}
    assert night.expected([early, *rows, loss], 8) == pytest.approx(0.6 + 0.05 * math.log(8))
