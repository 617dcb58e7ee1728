"""The time that a study takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastplm.study.progress import Speeds, progress, write_plan

from .conftest import finish, plan_of


def test_time_to_go(place):
    ready = [cell for cell in plan_of().cells.values() if not cell.provisional]
    write_plan(Path("plan.json"), ready, Path("cells"), jobs=2)
    assert progress(Path("plan.json")) == (0, len(ready), None)
    finish(ready[0])
    done, of_all, seconds = progress(Path("plan.json"))
    rest = sum(cell.cost for cell in ready[1:])
    assert (done, of_all) == (1, len(ready))
    assert seconds == pytest.approx(10.0 * rest / ready[0].cost / 2)
    speeds = Speeds([("pretrain", 100.0, 5.0), ("score", 10.0, 5.0)])
    assert speeds.seconds("pretrain", 40.0) == 2.0 and speeds.seconds("finetune", 11.0) == 1.0
