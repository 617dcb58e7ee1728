from __future__ import annotations

import subprocess
import sys

import pytest

from fastplm.cli import main


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


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown
    assert "Hugging Face, eager" in shown and "loss.png" in shown
