"""What ``tools/count_places.py`` takes for a place."""

from __future__ import annotations

import pytest

import count_places
from fastplm._registry import OPS

PYTHON = '''
class Call(NamedTuple):
    """The arguments.

    Args:
        input: [N].
        scale, bias: of it.
    """

    input: Tensor
    scale: float = 1.0

def forward(input, *, scale):
    tl.load(input, mask=scale)
    return run(input, scale=scale)
'''
CPP = "void run(const Tensor& input, double scale) {  // int64_t bias;\n  float scale = 2;\n}\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("op.py", PYTHON, {"input": 3, "scale": 4, "bias": 1, "mask": 0}),
        ("op.h", CPP, {"input": 1, "scale": 2, "bias": 0}),
    ],
)
def test_places(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text)
    found = count_places.places(path)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_argument_is_found(op):
    assert min(count_places.counts(op).values()) >= 2  # the public function and its documentation
