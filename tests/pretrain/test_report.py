"""What a run prints and draws."""

from __future__ import annotations

from matplotlib.figure import Figure

from fastplm.data._folder import verify
from fastplm.pretrain import report
from fastplm.pretrain.settings import PretrainArguments

COUNTS = ("unigram_loss", "bigram_loss")


def test_a_run_too_short_for_its_rate_says_so():
    """Where the rate follows from a published one, and with AdamW, whose steps have a bound."""
    for options, said in (({}, True), ({"lr": 1e-4}, False), ({"optimizer": "lamb"}, False)):
        plan = PretrainArguments("bert-tiny", ["-"], 2, "out", batch_size=4, **options).plan()
        assert ("give --lr 0.001" in report.learning_rate(plan)) == said


def test_the_picture_has_held_out_text(tmp_path, monkeypatch):
    """The loss over tokens stands beside a whole loss that has no parts, and by its name."""
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: shown.append(figure))
    history = [{"step": 1, "loss": 3.0}, {"step": 4, "loss": 2.0}]
    held_out = [{"step": 2, "clm_loss": 2.5, "unigram_loss": 4.0, "bigram_loss": 3.5}]
    assert report.plot_losses(tmp_path / "one.png", "", history, held_out, "clm_loss", COUNTS)
    history = [{**entry, "mlm_loss": 1.0, "rtd_loss": 0.5} for entry in history]
    held_out = [{"step": 4, "mlm_loss": 1.5, "unigram_loss": 4.0, "bigram_loss": 3.5}]
    assert report.plot_losses(tmp_path / "two.png", "", history, held_out, "mlm_loss", COUNTS)
    names = ["training", "held out", "held out, unigram", "held out, bigram"]
    for figure, panels in zip(shown, ([names], [names, names[:1]]), strict=True):
        lines = [axis.get_lines() for axis in figure.axes]
        assert [[line.get_label() for line in each] for each in lines] == panels
    assert shown[0].axes[0].get_lines()[1].get_xydata().tolist() == [[2.0, 2.5]]


def test_a_picture_that_fails(run, tmp_path, monkeypatch, capsys):
    def draw(figure, path, **_):
        path.write_bytes(b"half of a picture")
        raise ValueError("'nosuch' is not a valid value for backend\nsupported are many")

    monkeypatch.setattr(Figure, "savefig", draw)
    metrics = run(tmp_path / "out", steps=1)
    shown = capsys.readouterr()
    assert "loss.png was not drawn, as matplotlib failed: 'nosuch' is not" in shown.err
    assert "none was drawn" in shown.out and "many" not in shown.err
    assert metrics["picture"] is None and verify(tmp_path / "out") is None
    assert not (tmp_path / "out" / "loss.png").exists()


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
