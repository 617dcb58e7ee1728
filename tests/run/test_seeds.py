"""Means over seeds."""

from __future__ import annotations

from fastplm.run.seeds import interval, student_t


def test_interval_by_hand():
    """The quantiles are those of the tables."""
    assert interval([0.25]) == {"mean": 0.25, "half_width": None}
    # s = 1, n = 3: 4.30265273 / sqrt(3)
    result = interval([1.0, 2.0, 3.0])
    assert result["mean"] == 2 and f"{result['half_width']:.6f}" == "2.484138"
    table = {1: "12.706205", 2: "4.302653", 4: "2.776445", 9: "2.262157", 30: "2.042272"}
    assert {n: f"{student_t(0.95, n):.6f}" for n in table} == table
