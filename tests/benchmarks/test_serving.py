"""examples/serve_embeddings.py, as benchmarks/serving.py calls it."""

from __future__ import annotations

import http.client

import numpy as np
import pytest
import serving
from sentence_transformers import SentenceTransformer

TEXTS = ["ab cd", "a long text that is here to make the other ones short", "b", "of the b c d"]


def answer(port: int, body: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/embed", body, {"Content-Type": "application/json"})
    got = connection.getresponse()
    return got.status, got.read()


@pytest.mark.parametrize(
    "variant",
    [
        "fastplm",
        *(pytest.param(v, marks=pytest.mark.slow) for v in serving.VARIANTS if v != "fastplm"),
    ],
)
def test_the_example_serves_the_models_vectors(variant, checkpoint):
    known = SentenceTransformer(str(checkpoint), device="cpu").encode(TEXTS)
    with serving.server(str(checkpoint), serving.VARIANTS[variant], threads=1) as port:
        vectors, _, took = serving.load(port, TEXTS * 4, clients=4)
        assert len(took) == 4 * len(TEXTS)
        if variant == "fastplm":
            status, body = answer(port, '{"inputs": 3}')
            assert status == 422 and b"expected" in body
            assert answer(port, '{"inputs": []}') == (200, b"[]")
    away = np.abs(vectors - np.tile(known, (4, 1))).max()
    limit = 0.1 if "int8" in variant else 1e-5
    assert away < limit * np.abs(known).max()
