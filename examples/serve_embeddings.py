"""Serve vectors of texts over HTTP with LitServe; requests that wait are computed together.

    python examples/serve_embeddings.py CHECKPOINT [--int8] [--port 8000]
    curl localhost:8000/embed -H "Content-Type: application/json" \
        -d '{"inputs": ["A first text.", "A second one, which is longer."]}'

CHECKPOINT is a folder or name that sentence-transformers loads. The answer is a list of vectors,
one for each text, as from /embed of text-embeddings-inference, so its clients can be used.
"""

from __future__ import annotations

import argparse

import litserve
from fastapi import HTTPException
from sentence_transformers import SentenceTransformer

import fastplm


class Embed(litserve.LitAPI):
    """One model for all requests: LitServe calls ``setup`` in the process of a worker."""

    def __init__(self, checkpoint: str, fast: bool = True, int8: bool = False) -> None:
        # A request waits two milliseconds for others at most, and 32 are computed at once.
        super().__init__(max_batch_size=32, batch_timeout=0.002, api_path="/embed")
        self.checkpoint, self.fast, self.int8 = checkpoint, fast, int8

    def setup(self, device: str) -> None:
        self.model = SentenceTransformer(self.checkpoint, device=device)
        if self.fast:
            fastplm.accelerate(self.model)
        if self.int8:
            fastplm.quantize(self.model)

    # LitServe would read a type of ``request`` as that of a field of the query.
    def decode_request(self, request) -> list[str]:
        texts = request.get("inputs") if isinstance(request, dict) else None
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise HTTPException(422, 'expected {"inputs": TEXT} or {"inputs": [TEXT, ...]}')
        return texts

    def predict(self, requests: list[list[str]]) -> list[list[list[float]]]:
        texts = [text for request in requests for text in request]
        vectors = iter(self.model.encode(texts, show_progress_bar=False).tolist())
        return [[next(vectors) for _ in request] for request in requests]

    def unbatch(self, output: list[list[list[float]]]) -> list[list[list[float]]]:
        return output

    def encode_response(self, output: list[list[float]]) -> list[list[float]]:
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--int8", action="store_true", help="quantize the model to 8 bits")
    parser.add_argument("--stock", action="store_true", help="do not accelerate it, to compare")
    args = parser.parse_args()
    api = Embed(args.checkpoint, fast=not args.stock, int8=args.int8)
    server = litserve.LitServer(api, accelerator="cpu", timeout=60)
    server.run(port=args.port, host="127.0.0.1", generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
