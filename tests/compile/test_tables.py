"""The tool that compares launch configurations: what it tries, and what it says of each."""

from __future__ import annotations

import pytest
from tables import configs_of, costs, table

pytestmark = pytest.mark.compile

#: Compiles a small kernel as shipped, twice as wide, in a way that no compiler takes, and again.
TRIED = """
import dataclasses, json
import tables

((label, launch),) = tables.chosen_launches("gather_rows", 90, "gather_rows_fwd", "bfloat16.*E=768")
shipped = launch.arguments["BLOCK_E"]
configs = [{"BLOCK_E": 2 * shipped}, {"BLOCK_E": 3}, {"BLOCK_E": shipped}]
for star, report in tables.tried("gather_rows", label, 90, launch, configs):
    print(json.dumps([star, report if isinstance(report, str) else dataclasses.asdict(report)]))
"""


def test_every_combination_is_tried_once():
    assert configs_of(["A=1,2 B=3", "A=4"]) == [{"A": 1, "B": 3}, {"A": 2, "B": 3}, {"A": 4}]


def test_the_shipped_configuration_stands_beside_those_tried(run):
    from compile_kernels import Report

    found = run("-c", TRIED)
    assert [star for star, _ in found] == [True, False, False]  # the shipped one is not tried twice
    (_, shipped), (_, wide), (_, broken) = found
    assert broken.startswith("BLOCK_E=3: ")
    shipped, wide = Report(**shipped), Report(**wide)
    assert wide.moved > 1.9 * shipped.moved and set(shipped.accesses) == {"LDG", "STG"}
    text = table([(True, shipped), (False, wide)])
    head, *lines = text.splitlines()
    assert sorted(line[0] for line in lines) == [" ", "*"]
    assert "E=768" not in text and "LDG:" in text  # what is alike is left out
    last = wide if min(costs(wide), costs(shipped)) == costs(wide) else shipped
    assert (lines[-1][0] == "*") == (last is shipped)
