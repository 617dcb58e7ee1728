from __future__ import annotations

import subprocess
import sys

import pytest

from fastplm.cli import main
from fastplm.train.demo import LEAST_STEPS


def test_help_does_not_wait_for_transformers():
    script = (
        "import sys; from fastplm.cli import main\n"
        "try: main(['pretrain', '--help'])\n"
        "finally: print('transformers' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0
    assert shown.stdout.rstrip().endswith("False")
    assert "keeps attention on the fused kernel" in " ".join(shown.stdout.split())


def test_info(capsys):
    assert main(["info"]) == 0
    assert "attention" in capsys.readouterr().out


def test_demo_in_no_time(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--minutes", "-1"]) == 2
    assert "`minutes` got -1.0; expected more than 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    """In the shortest time there are the least steps, and what they are to show is seen."""
    assert main(["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert f" {LEAST_STEPS} steps in about " in shown
    assert "FAIL" not in shown and shown.count("\nok ") == 5
    assert "Hugging Face, eager" in shown and "loss.png" in shown
