"""The summary and the picture of a pre-training, and the units of its dry run."""

from __future__ import annotations

from fastplm.data._folder import verify
from fastplm.pretrain import report
from fastplm.pretrain.dry_run import _bytes, _duration


def test_a_picture_that_fails(run, tmp_path, monkeypatch, capsys):
    def draw(path, *_):
        path.write_bytes(b"half of a picture")
        raise ValueError("'nosuch' is not a valid value for backend\nsupported are many")

    monkeypatch.setattr(report, "_draw_losses", draw)
    metrics = run(tmp_path / "out", steps=1)
    shown = capsys.readouterr()
    assert "loss.png was not drawn, as matplotlib failed: 'nosuch' is not" in shown.err
    assert "none was drawn" in shown.out and "many" not in shown.err
    assert metrics["picture"] is None and verify(tmp_path / "out") is None
    assert not (tmp_path / "out" / "loss.png").exists()


def test_units_that_fit():
    assert [_duration(x) for x in (2e-5, 0.4, 1.06, 75, 21132, 1e6)] == [
        *("0.02 ms", "400 ms", "1.06 s", "1.25 minutes", "5.87 hours", "11.6 days")
    ]
    sizes = [_bytes(x) for x in (0, 1 << 20, 279_000_000, 80 << 30)]
    assert sizes == ["0.00 KiB", "1.00 MiB", "266 MiB", "80.0 GiB"]


def test_the_summary_says_what_its_two_kinds_of_figures_are(tmp_path):
    metrics = {
        "history": [{"loss": 2.0}],
        "held_out": {"balanced_accuracy": 0.5, "words": {"balanced_accuracy": 0.75}},
        **dict(parameters=1, precision="fp32", tokens_per_second=1.0, train_seconds=1.0),
        **dict(models={}, picture="loss.png"),
    }
    shown = report.summary(metrics)
    assert "held out: balanced accuracy            0.5000" in shown
    assert "held out, by share: balanced accuracy  0.7500" in shown
    assert "\n(by share " in shown and "above 0.5)" in shown
    del metrics["held_out"]["words"]
    assert "by share" not in report.summary(metrics)
