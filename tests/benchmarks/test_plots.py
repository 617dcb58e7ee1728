"""The pictures show the rows' figures, and missing rows are named. The rows are planted."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import plots

COLUMNS = (
    *("date", "machine", "torch", "triton", "commit", "op", "case", "direction", "variant"),
    *("p20_us", "p50_us", "p80_us", "gb_per_s", "gflop_per_s", "peak_mb", "vs_eager", "status"),
    *("of_roofline", "mfu", "tokens_per_s", "launches"),
)


def row(op="attention", case="c", variant="fastplm", p50=100.0, direction="training", **given):
    made = dict.fromkeys(COLUMNS, "")
    made |= dict(date="2026-01-02 03:04", machine="cpu Some (2 threads)", torch="2", triton="3")
    made |= dict(commit="abc", op=op, case=case, direction=direction, variant=variant, status="ok")
    if p50 is not None:
        made |= dict(p20_us=0.9 * p50, p50_us=p50, p80_us=1.1 * p50)
    return {name: str(value) for name, value in (made | given).items()}


def write(path: Path, rows, columns=COLUMNS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def title(figure) -> str:
    return figure._suptitle.get_text()


# --- rows -----------------------------------------------------------------------------------------


def test_the_last_run_of_a_case_counts_and_other_tables_are_left_alone(tmp_path):
    runs = [row(p50=5, date="2026-01-01 00:00"), row(variant="gone", date="2026-01-01 00:00")]
    runs += [row(case="other", variant="gone"), row(p50=7), row(variant="eager")]
    write(tmp_path / "attention.csv", runs)
    write(tmp_path / "old.csv", [row(op="old")], COLUMNS[:17])
    write(tmp_path / "finetuning.csv", [{"task": "qa"}], ["task"])
    rows = plots.latest_rows(tmp_path)
    assert [(r["op"], r["case"], r["variant"], r["p50_us"]) for r in rows] == [
        ("attention", "c", "fastplm", "7"),
        ("attention", "c", "eager", "100.0"),
        ("attention", "other", "gone", "100.0"),
        ("old", "c", "fastplm", "100.0"),
    ]
    assert plots.number(rows[-1], "of_roofline") is None


def test_marks_and_our_own_variants_are_no_peers():
    variants = {
        name: row(variant=name, p50=p50)
        for name, p50 in {
            "eager": 1,
            "eager, counts": 1,
            "fastplm, no bias": 1,
            "index_select, spare slots wrong": 1,
            "sdpa": 9,
            "flex": 8,
        }.items()
    }
    assert plots.fastest_other(variants)["variant"] == "flex"
    assert plots.fastest_other({"eager": row(variant="eager")}) is None


def test_no_torch_is_needed():
    code = "import sys, plots, gpu_report; sys.exit('torch' in sys.modules)"
    folder = Path(plots.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


# --- pictures -------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_rows_say_and_the_title_counts():
    rows = [
        row(case="won", p50=50, vs_eager=4),
        row(case="won", variant="sdpa", p50=100, vs_eager=2),
        row(case="lost", p50=100, vs_eager=1.5),
        row(case="lost", variant="flex", p50=50, vs_eager=3),
        row("mask_tokens", "third", p50=50, vs_eager=2),
        row("mask_tokens", "fourth", p50=50, vs_eager=2),
        row(case="dead", variant="sdpa", p50=None, status="failed: no"),
    ]
    figure = plots.speed(rows)
    widths = [round(bar.get_width(), 6) for bar in figure.axes[0].patches if bar.get_width()]
    assert widths == [3, 1, 0.5, 2, 1]
    assert title(figure).endswith("in 1 of 2 cases")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["attention: won", "attention: lost", "mask tokens: third"]


def steps(setting, gains, **given):
    for share, gain in gains.items():
        case = setting.format(share)
        yield row("bert", case, p50=100, **given)
        yield row("bert", case, "transformers sdpa", p50=100 * gain, **given)
        yield row("bert", case, "eager", p50=90 * gain, **given)


def test_every_machine_gets_its_pictures_and_what_is_missing_is_said(tmp_path):
    write(tmp_path / "rows/cpu/attention.csv", [row(gb_per_s=4, gflop_per_s=8)])
    write(tmp_path / "rows/some-gpu/bert.csv", steps("x padding {}% y", {0: 1, 30: 1, 50: 1}))
    (tmp_path / "rows/static").mkdir()
    write(tmp_path / "rows/static/kernels.csv", [{"op": "attention"}], ["op"])
    drawn, missing = plots.draw_all(tmp_path / "rows", tmp_path / "images")
    assert sorted(path.name for path in drawn) == ["padding-some-gpu.png", "roofline-cpu.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert len(missing) == 6 and all(": no row" in reason for reason in missing)


def test_the_committed_rows_make_the_pictures_of_the_pages(tmp_path):
    folder = Path(plots.__file__).parent / "results"
    if not folder.is_dir():
        pytest.skip("no rows were shipped")
    drawn, _ = plots.draw_all(folder, tmp_path)
    assert {"roofline-cpu.png", "speed-cpu.png", "padding-cpu.png"} <= {p.name for p in drawn}
