"""What a pre-training says before it begins."""

from __future__ import annotations

import pytest
import torch

from fastplm.run.report import counted


@pytest.mark.slow
def test_announcement(run, corpus, tmp_path, capsys):
    run(tmp_path / "first", steps=1)  # fills the cache, if no other test has
    capsys.readouterr()
    run(tmp_path / "out", steps=2)
    shown = capsys.readouterr().err
    block, _, lines = shown.partition("\nstep 1/2")
    rows = {line.split()[0]: line for line in block.splitlines()}
    assert str(corpus) in rows["corpus"] and "150 documents" in rows["corpus"]
    assert "6,264 tokens" in rows["corpus"] and "found in" in rows["corpus"]
    assert "312 tokens (5.0%)" in rows["held"]
    assert "116 tokens instead of 120, as this text gives no more" in rows["vocabulary"]
    assert "bert-tiny (Turc et al. 2019), mlm+nsp" in rows["model"]
    assert "FLOP a token" in rows["model"]
    assert rows["learning"].endswith("0.001 with adamw, as given")
    assert "steps 1 to 2, 4 samples of 32 tokens" in rows["training"]
    assert "fp32, as --precision says" in rows["precision"]
    assert f"{counted(torch.get_num_threads(), 'thread')}, 1 process" in rows["device"]
    assert "eager" in rows["backends"] and str(tmp_path / "out") in rows["results"]
    assert " gone 0:0" in lines and " to go 0:0" in lines
