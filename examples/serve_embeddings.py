"""Serve vectors of texts over HTTP with LitServe; requests that wait are computed together.

    python examples/serve_embeddings.py CHECKPOINT [--int8] [--port 8000]
    curl localhost:8000/embed -H "Content-Type: application/json" \
        -d '{"inputs": ["A first text.", "A second one, which is longer."]}'

CHECKPOINT is a folder or name that sentence-transformers loads. The answer is a list of vectors,
one for each text, of length 1 unless the request has "normalize": false. Of the fields of
text-embeddings-inference's /embed these two are known; a request with another one is refused.
"""

import argparse
from typing import Annotated

import litserve
import numpy as np
from pydantic import AfterValidator, BaseModel
from sentence_transformers import SentenceTransformer

import fastplm


def encodable(text: str) -> str:
    """JSON can have half a character, a lone surrogate, which no tokenizer takes."""
    text.encode()  # raises a ValueError
    return text


Text = Annotated[str, AfterValidator(encodable)]


class Request(BaseModel, extra="forbid"):
    """FastAPI checks it before it waits for others, so a bad one fails alone."""

    inputs: Text | list[Text]
    normalize: bool = True


class Embed(litserve.LitAPI):
    """One model for all requests: LitServe calls ``setup`` in the process of a worker."""

    def __init__(self, checkpoint: str, fast: bool = True, int8: bool = False) -> None:
        # A request waits two milliseconds for others at most; 32 are computed at once.
        super().__init__(max_batch_size=32, batch_timeout=0.002, api_path="/embed")
        self.checkpoint, self.fast, self.int8 = checkpoint, fast, int8

    def setup(self, device: str) -> None:
        self.model = SentenceTransformer(self.checkpoint, device=device)
        if self.fast:
            fastplm.accelerate(self.model)
        if self.int8:
            fastplm.quantize(self.model)
        if self.fast or self.int8:
            fastplm.freeze(self.model)

    def decode_request(self, request: Request) -> Request:
        return request

    def predict(self, requests: list[Request]) -> list[list[list[float]]]:
        texts = [
            [each.inputs] if isinstance(each.inputs, str) else each.inputs for each in requests
        ]
        flat = [text for given in texts for text in given]
        vectors = self.model.encode(flat, show_progress_bar=False)
        ends = np.cumsum([len(given) for given in texts])
        answers = np.split(vectors, ends[:-1]) if flat else [np.empty((0, 0))] * len(requests)
        for request, answer in zip(requests, answers, strict=True):
            if request.normalize:
                answer /= np.linalg.norm(answer, axis=1, keepdims=True).clip(1e-12)
        return [answer.tolist() for answer in answers]

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
