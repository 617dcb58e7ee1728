from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "said"), [(None, True), (1e-4, False)])
def test_a_run_too_short_for_its_rate_says_so(run, lr, said, tmp_path, capsys):
    run(tmp_path / "out", steps=2, lr=lr)
    assert ("give --lr 0.001" in capsys.readouterr().err) == said
