"""The numbers of iterations in the pages of bounds, counted by hand. Nothing is compiled."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.compile


@pytest.fixture
def bound(monkeypatch):
    """The script of this name from benchmarks/."""
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return importlib.import_module


def test_every_product_of_the_vocabulary_pass_covers_its_matrix(bound):
    script = bound("linear_cross_entropy_bound")
    for kept, width in ((True, 768), (False, 768), (False, 128)):
        shape = script.Shape("", 1000, 5000, width, (0, 0), 0, samples=True)
        done = {}  # multiplications by product
        for launch in script.recorded(shape, kept):
            if isinstance(launch, script.Product):
                done[len(done)] = launch.m * launch.n * launch.k
                continue
            name = launch.kernel.__name__
            name = name.removeprefix("_linear_cross_entropy_").removesuffix("_kernel")
            if name not in ("fwd", "bwd_logits", "bwd_input", "bwd_weight"):
                continue
            given = launch.arguments
            step = given["BLOCK_N"] * given["BLOCK_V"] * given["BLOCK_E"]
            done[name] = done.get(name, 0) + script.iterations(launch, name, shape) * step
        wanted = {"fwd", "bwd_input", "bwd_weight"} | ({"bwd_logits"} if width > 128 else set())
        assert set(done) == ({0, 1, 2} if kept else wanted)
        product = 1000 * 5000 * width
        for name, multiplications in done.items():
            # The tiles do all the work, and no more than the empty parts of the last tiles.
            assert product <= multiplications < 1.25 * product, name


def test_attention_counts_the_tiles_on_and_below_the_diagonal(bound):
    script = bound("attention_bound")
    for is_causal in (False, True):
        shape = script.Shape(2, 3, 1024, 1024, is_causal=is_causal)
        forward, _ = script.launches(shape)
        launch = forward[-1]
        assert "stream_fwd" in launch.kernel.__name__
        block_q, block_k = launch.arguments["BLOCK_Q"], launch.arguments["BLOCK_K"]
        tiles = sum(
            not is_causal or start_k < start_q + block_q
            for start_q in range(0, 1024, block_q)
            for start_k in range(0, 1024, block_k)
        )
        assert script.iterations(launch, shape) == 2 * 3 * tiles
        assert math.isclose(
            tiles * block_q * block_k / 1024**2, 0.56 if is_causal else 1, abs_tol=0.1
        )
