"""Merges two tables of ``fastplm measure`` for a kind of CPU: each size gets the smaller gain.

    python benchmarks/merge_tables.py FIRST SECOND OP… > fastplm/measured/KIND.json

So csrc/ is only chosen where it is faster in both tables. Ops that are not named, because their
code has changed since the second table was measured, come from the first table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fastplm._measure import dump


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A series of an op: at each size, the times from the table with the smaller gain."""
    if one["axes"] != other["axes"]:
        raise SystemExit("the tables are of other sizes")
    cells = zip(one["ours"], one["stock"], other["ours"], other["stock"], strict=True)
    kept = [(a, b) if b / a <= d / c else (c, d) for a, b, c, d in cells]
    return one | {"ours": [ours for ours, _ in kept], "stock": [stock for _, stock in kept]}


def main(first: str, second: str, *ops: str) -> None:
    table, other = (json.loads(Path(name).read_text()) for name in (first, second))
    for op in ops:
        series = table["ops"][op]
        for form in series.keys() & other["ops"][op].keys():
            series[form] = merged(series[form], other["ops"][op][form])
    print(dump(table), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
