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


def test_a_picture_is_of_one_machine():
    old = row("bert", "x", date="2026-01-01 00:00", machine="cpu Other (64 threads)")
    assert plots.of_one_machine([old, row("bert", "y")]) == [row("bert", "y")]
    both = [old, {**old, "case": "z"}]  # more cases count more than a newer row
    assert plots.of_one_machine([*both, row("bert", "y")]) == both
    slow = [row(case="elsewhere", vs_eager=9, date="2025", machine="cpu Other"), row(vs_eager=2)]
    assert len(plots.speed(slow).axes[0].get_yticks()) == 1
    assert plots.of_one_machine([]) == []


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


def at_the_roof(intensity, share, bandwidth=10.0, peak=100.0, **given):
    """A row that reaches ``share`` of a roofline of so many GB/s and GFLOP/s."""
    rate = share * min(peak, bandwidth * intensity)
    return row(gb_per_s=rate / intensity, gflop_per_s=rate, of_roofline=share, **given)


def test_the_roofline_is_that_of_the_rows_and_kernels_lie_under_it():
    rows = [
        at_the_roof(2, 0.5, case="memory"),
        at_the_roof(2, 0.8, case="memory", variant="sdpa", p50=50),
        at_the_roof(50, 0.25, case="products", op="linear_cross_entropy"),
        row(op="gather_rows", gb_per_s=4, direction="forward"),
    ]
    figure = plots.roofline(rows)
    moving, axes = figure.axes
    roof = next(line for line in axes.lines if len(line.get_xdata()) == 3)
    xs, ys = roof.get_xdata(), roof.get_ydata()
    assert ys[1:] == pytest.approx([100, 100]) and xs[1] == pytest.approx(10)
    assert ys[0] / xs[0] == pytest.approx(10) and roof.get_linestyle() == "-"
    points = {
        (round(float(x), 6), round(float(y), 6))
        for line in axes.lines
        if len(line.get_xdata()) == 1
        for x, y in [(line.get_xdata()[0], line.get_ydata()[0])]
    }
    assert points == {(2, 10), (2, 16), (50, 25)}
    assert [line.get_ydata()[0] for line in moving.lines][0] == 4
    assert "attention 50%" in title(figure) and "linear cross entropy 25%" in title(figure)


def test_without_ceilings_the_best_rates_stand_for_them():
    rows = [row(gb_per_s=4, gflop_per_s=8), row(case="d", gb_per_s=2, gflop_per_s=60)]
    figure = plots.roofline(rows)
    roof = next(line for line in figure.axes[1].lines if len(line.get_xdata()) == 3)
    assert roof.get_linestyle() == "--" and roof.get_ydata()[-1] == 60
    assert not figure.axes[0].get_visible()


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


def test_padding_has_a_panel_a_setting_and_the_ratios_of_the_medians():
    rows = [
        *steps("base 8x128 padding {}% dropout 0 fp32", {0: 1.5, 30: 2.0, 50: 3.0}),
        *steps("base 8x128 padding {}% dropout 0.1 bf16", {0: 1.2, 30: 1.8, 50: 2.5}),
        *steps("mini 4x128 padding {}% dropout 0.1 fp32", {0: 9, 50: 9}),
        row("bert", "tiny", commit="newer", date="2026-01-03 00:00"),
    ]
    older = dict(commit="older", date="2026-01-01 00:00")
    rows += steps("base 8x128 padding {}% dropout 0 fp32", {35: 9}, **older)
    figure = plots.padding(rows)
    assert [axes.get_title("left") for axes in figure.axes] == [
        "BERT-base 8x128 fp32",
        "BERT-base 8x128 dropout 0.1 bf16",
    ]
    lines = {c.get_label(): c.lines[0].get_ydata() for c in figure.axes[0].containers}
    assert list(lines["against Transformers, SDPA"]) == pytest.approx([1.5, 2.0, 3.0])
    assert list(lines["against Transformers, eager"]) == pytest.approx([1.35, 1.8, 2.7])
    assert "1.2–1.5×" in title(figure) and "2.5–3.0× at 50 %" in title(figure)


def losses(vocab, ours, theirs):
    case = f"N 1024, 85 % ignored, E 768, fp32, V {vocab}"
    yield row("loss_memory", case, plots.HEADS, peak_mb=ours)
    yield row("loss_memory", case, "full logits", peak_mb=theirs)


def test_memory_is_drawn_by_the_size_of_the_vocabulary():
    figure = plots.memory([*losses(2048, 12, 30), *losses(1024, 10, 20)])
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["fastplm, as in its models: the rows that count"] == [10, 12]
    assert lines["full logits, as Transformers' classes"] == [20, 30]
    gradients = lines["the gradients themselves (arithmetic)"]
    assert gradients[0] == pytest.approx(((1024 + 1024) * 768 + 1024) * 4 / 2**20)
    assert "2,048" in title(figure) and "2.5×" in title(figure)


def rates(batch, padding, order="natural", date="2026-01-02 03:04", **ms):
    about = dict(date=date, machine="cpu", torch="2", triton="3", commit="abc", task="embed")
    about |= dict(model="minilm", batch=batch, order=order, padding=padding)
    for variant, time in ms.items():
        row = about | dict(variant=variant.replace("_", " "), ms=time, texts_per_s=1e3 / time)
        yield {name: str(value) for name, value in row.items()}


def test_inference_is_drawn_over_the_best_peer_in_fp32(tmp_path):
    rows = [*rates(1, 0, fastplm=2, openvino=2, transformers_sdpa=9, openvino_int8=1)]
    rows += rates(8, 0.4, fastplm=1, openvino=9, date="2025-01-01 00:00")
    rows += rates(8, 0.4, fastplm=10, openvino=30, onnxruntime=15)
    rows += rates(8, 0.1, "sorted", fastplm=10, openvino=9)
    write(tmp_path / "peers_cpu.csv", rows, rows[0])
    figure = plots.peers(plots.rows_of_peers(tmp_path))
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines[1:]}
    assert lines == {"texts in their own order": [1, 1.5], "texts sorted by length": [0.9]}
    assert "2 of 3" in title(figure)
    assert "40 %\nonnxruntime" in [text.get_text() for text in figure.axes[0].texts]


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
