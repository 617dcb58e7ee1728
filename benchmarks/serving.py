"""Requests a second of examples/serve_embeddings.py, with a model as it comes and with ours.

    pip install ".[serve]"
    python benchmarks/serving.py --model DIR --texts FILE --rows FILE.csv

Each client sends one text after the other, which is the last column of a line of FILE, and waits
for its vector. A server runs one variant alone, with --threads threads for its model; the clients
are on the same machine. In every round each number of clients sends all texts, the variants take
turns, and a row has the median of the rounds. The vectors are compared with those of the model as
it comes.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from harness import append_row, machine_line

EXAMPLE = Path(__file__).parents[1] / "examples/serve_embeddings.py"
VARIANTS = {"sentence-transformers": ["--stock"], "fastplm": [], "fastplm int8": ["--int8"]}
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "litserve", "model", "threads", "texts"),
    *("clients", "variant", "requests_per_s", "p50_ms", "p99_ms", "difference", "cosine"),
)
SECONDS_TO_START = 120


class Client:
    """One connection, on which requests follow one another."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.took: list[float] = []

    def __call__(self, text: str) -> list[float]:
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", "/embed", json.dumps({"inputs": text}), headers)
        answer = self.connection.getresponse()
        body = answer.read()
        self.took.append(1e3 * (time.perf_counter() - start))
        assert answer.status == 200, body
        return json.loads(body)[0]


@contextmanager
def server(model: str, options: list[str], threads: int) -> Iterator[int]:
    """The port of a server that is ready."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), model, "--port", str(port), *options]
    settings = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=settings, start_new_session=True)
    try:
        for _ in range(SECONDS_TO_START):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            assert process.poll() is None, "the server ended"
            time.sleep(1)
        else:
            raise TimeoutError(f"no server after {SECONDS_TO_START} s")
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # LitServe has a process for each part
        process.wait()


def load(port: int, texts: list[str], clients: int) -> tuple[np.ndarray, float, np.ndarray]:
    """The vectors of all texts, the requests a second, and the milliseconds of each request."""
    clients = min(clients, len(texts))
    each = [Client(port) for _ in range(clients)]
    parts = [texts[first::clients] for first in range(clients)]
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda client, part: list(map(client, part)), each, parts))
    rate = len(texts) / (time.perf_counter() - start)
    vectors = np.empty((len(texts), len(answers[0][0])), dtype=np.float32)
    for first, part in enumerate(answers):
        vectors[first::clients] = part
    return vectors, rate, np.concatenate([client.took for client in each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--texts", type=Path, required=True, help="one text a line")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that the rows go to")
    parser.add_argument("--count", type=int, default=512, help="texts of a round")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    lines = args.texts.read_text(encoding="utf-8").splitlines()
    texts = [line.split("\t")[-1] for line in lines if line.strip()][: args.count]
    vectors: dict[str, np.ndarray] = {}
    found: dict[tuple[int, str], list[tuple[float, np.ndarray]]] = {}
    for _ in range(args.rounds):
        for variant, options in VARIANTS.items():
            with server(args.model, options, args.threads) as port:
                load(port, texts[:64], 8)  # the first calls are slower
                for clients in args.clients:
                    vectors[variant], rate, took = load(port, texts, clients)
                    found.setdefault((clients, variant), []).append((rate, took))
    stock = vectors["sentence-transformers"]
    row = machine_line() | {"litserve": importlib.metadata.version("litserve")}
    row |= {"model": Path(args.model).name, "threads": args.threads, "texts": len(texts)}
    for (clients, variant), rounds in sorted(found.items()):
        ours = vectors[variant]
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(stock, axis=1)
        took = np.concatenate([took for _, took in rounds])
        row |= {"clients": clients, "variant": variant}
        row |= {"requests_per_s": f"{np.median([rate for rate, _ in rounds]):.1f}"}
        row |= {"p50_ms": f"{np.median(took):.2f}", "p99_ms": f"{np.quantile(took, 0.99):.2f}"}
        row |= {"difference": f"{np.abs(ours - stock).max():.1e}"}
        row |= {"cosine": f"{((ours * stock).sum(1) / lengths).mean():.5f}"}
        append_row(args.rows, FIELDS, row)
        print(row)


if __name__ == "__main__":
    main()
