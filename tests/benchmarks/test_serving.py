"""examples/serve_embeddings.py, as benchmarks/serving.py calls it."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import serving
from sentence_transformers import SentenceTransformer

TEXTS = ["ab cd", "a long text that is here to make the other ones short", "b", "of the b c d"]
BAD = ['{"inputs": 3}', "no JSON", "[1]", '{"text": "a"}', '{"inputs": "a", "prompt_name": "b"}']
NO_TEXT = '{"inputs": "\\ud800"}'  # FastAPI refuses it, and cannot quote it in its answer


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
    known = SentenceTransformer(str(checkpoint), device="cpu")
    known = known.encode(TEXTS, normalize_embeddings=True)
    with serving.server(str(checkpoint), serving.VARIANTS[variant], threads=1) as port:
        vectors, _, took = serving.load(port, TEXTS * 4, clients=4)
        assert len(took) == 4 * len(TEXTS)
        if variant == "fastplm":
            with ThreadPoolExecutor(4) as pool:  # good and bad requests at once
                good = pool.map(lambda _: serving.load(port, TEXTS * 4, clients=2), range(2))
                bad = pool.map(lambda body: answer(port, body)[0], [*BAD, NO_TEXT] * 8)
                assert list(bad) == [*[422] * len(BAD), 500] * 8
                for more, *_ in good:
                    np.testing.assert_allclose(more, vectors, rtol=0, atol=1e-5)
            assert answer(port, '{"inputs": []}') == (200, b"[]")
            _, body = answer(port, '{"inputs": "ab cd", "normalize": false}')
            assert abs(np.linalg.norm(json.loads(body)[0]) - 1) > 1e-3
    limit = 0.1 if "int8" in variant else 1e-5
    away = np.abs(vectors - np.tile(known, (4, 1))).max()
    assert away < limit * np.abs(known).max()
