"""The index of a corpus against its references: runs of sentences, packing.

The corpus has 10^6 tokens, with ``pytest benchmarks/test_index.py -m slow --benchmark-only`` 10^8.
"""

from __future__ import annotations

import functools
import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fastplm.data import PackedDocuments, SentenceChunks, TokenStore, index
from harness import Case, default_device

VOCAB, BLOCK = 30_000, 128
SMALL, LARGE = 10**6, 10**8
AT_ONCE = 10**6

on_cpu = pytest.mark.skipif(default_device().type == "cuda", reason="it runs on the CPU alone")


@functools.cache
def folders():
    return tempfile.TemporaryDirectory()  # removed when Python ends


@functools.cache
def folder_of(tokens):
    """A corpus with sentences of 21 tokens and documents of 20 sentences on average."""
    random = np.random.default_rng(0)
    path = Path(folders().name) / str(tokens)
    path.mkdir()
    with (path / "tokens.bin").open("wb") as file:
        for _ in range(0, tokens, AT_ONCE):
            file.write(random.integers(VOCAB, size=AT_ONCE, dtype=np.uint16).tobytes())
    ends = np.cumsum(2 + random.poisson(19, size=tokens // 16))
    ends = np.array([0, *ends[ends < tokens], tokens])
    ends.tofile(path / "sentences.bin")
    starts = np.cumsum(random.geometric(1 / 20, size=len(ends) // 8))
    np.array([0, *starts[starts < len(ends) - 1], len(ends) - 1]).tofile(path / "documents.bin")
    (path / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": VOCAB}))
    return path


def chunks(function, store):
    return [function(store.sentences, store.documents, BLOCK - 3)]


def packing(function, store):
    lengths = np.diff(store.sentences[store.documents])
    return function(np.minimum(lengths, 4 * BLOCK), 4 * BLOCK)


def assert_same(variant, eager, inputs):
    for got, expected in zip(variant(**inputs), eager(**inputs), strict=True):
        assert np.array_equal(got, expected)


def case(label, tokens, task, name, bytes_a_token):
    def store(size, device):
        return {"store": TokenStore(folder_of(size))}

    def variant(suffix):
        return functools.partial(task, getattr(index, name + suffix))

    return Case(
        op="index",
        label=f"{label} {tokens:.0e} tokens",
        make=functools.partial(store, tokens),
        make_small=functools.partial(store, SMALL),
        variants={"eager": variant("_ref"), "fastplm": variant("")},
        gate=assert_same,
        bytes=int(bytes_a_token * tokens),
        tokens=tokens,
    )


def cases(tokens):
    return [
        case("chunks", tokens, chunks, "sentence_chunks", 8 / 21 + 24 / BLOCK),
        case("packing", tokens, packing, "pack_sequences", 16 / 420),
    ]


def wanted(request, tokens):
    if tokens == LARGE and "slow" not in request.config.option.markexpr:
        pytest.skip("10^8 tokens are indexed with -m slow")


SIZES = [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)]
#: No case for a report on a GPU, as all of this runs on the CPU.
CASES = [] if default_device().type == "cuda" else cases(SMALL)


@on_cpu
@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("task", range(2), ids=["chunks", "packing"])
def test_index(task, tokens, bench, request):
    wanted(request, tokens)
    bench(cases(tokens)[task], "forward")


class OwnMemory(threading.Thread):
    """The growth of the process's memory to its peak, without the pages of mapped files."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()
        self.before = self.now()
        self.start()

    @staticmethod
    def now():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("this kernel does not tell RssAnon")

    def run(self):
        while not self.done.wait(0.002):
            self.peak = max(self.peak, self.now() - self.before)

    def stop(self):
        self.done.set()
        self.join()
        return self.peak


@on_cpu
@pytest.mark.parametrize("tokens", SIZES)
def test_build(tokens, benchmark, request, capsys):
    """Measures both datasets from files that this store has not read before."""
    wanted(request, tokens)
    path = folder_of(tokens)

    def forget():
        for made in ("valid-*", "chunks-*", "packed-*"):
            for folder in path.glob(made):
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()

    def build():
        store = TokenStore(path)
        return len(SentenceChunks(store, BLOCK)), len(PackedDocuments(store, 4 * BLOCK))

    forget()
    memory, started = OwnMemory(), time.perf_counter()
    runs, blocks = build()
    seconds, peak = time.perf_counter() - started, memory.stop()
    benchmark.pedantic(build, setup=forget, rounds=3)
    benchmark.extra_info |= {"first_s": seconds, "own_memory_mib": peak / 2**20}
    with capsys.disabled():
        print(
            f"\n{tokens:.0e} tokens: {runs} runs and {blocks} blocks in {seconds:.2f} s at first, "
            f"{benchmark.stats['median']:.2f} s again, {peak / 2**20:.0f} MiB beside the files"
        )
