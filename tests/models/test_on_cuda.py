"""What a training step asks of a GPU: waits, rows, masks and draws, on one that does not exist."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import step_model

from . import on_cuda
from .on_cuda import CAPACITY, LABELS, LAYERS, REACHED, TOKENS, TOTAL

pytestmark = pytest.mark.skipif(
    step_model.find_compiler() is None, reason="there is no C++ compiler"
)
CASES = list(on_cuda.cases())


@pytest.fixture(scope="module")
def steps():
    """What ``on_cuda.py`` has counted, by model and batch."""
    run = subprocess.run(
        [sys.executable, on_cuda.__file__], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = (line for line in run.stdout.splitlines() if line.startswith("["))
    return {(name, batch): found for name, batch, found in map(json.loads, lines)}


def of_batch(*batches):
    chosen = [case for case in CASES if case[1] in batches]
    ids = [" ".join(case) for case in chosen]
    return pytest.mark.parametrize("case", chosen, ids=ids)


@of_batch("padded", "full")
def test_labels_and_tokens_are_counted_in_one_wait(steps, case):
    assert len(steps[case]["reads"]) == 1


@of_batch("capacity", "positions")
def test_a_capacity_needs_no_wait(steps, case):
    assert steps[case]["reads"] == []
    assert max(steps[case]["rows"]) <= CAPACITY


@of_batch("padded", "full", "positions")
def test_the_last_layer_computes_only_labelled_rows(steps, case):
    name, batch = case
    rows, most = steps[case]["rows"], {"padded": TOKENS, "full": TOTAL}.get(batch, CAPACITY)
    assert max(rows) == most, "padding is left out"
    if "ForMaskedLM" in name:
        assert rows.count(LABELS) == 2  # forward and backward
    if "Generation" in name and batch == "padded":
        assert rows.count(REACHED) == 4 * LAYERS, "the decoder ends at the last label"


@of_batch("padded", "full")
def test_a_batch_without_masked_keys_has_no_key_mask(steps, case):
    assert steps[case]["names"].get("masked attention", 0) == 0


@of_batch("labels on padding", "capacity")
def test_the_bits_of_a_key_mask_are_made_once(steps, case):
    """The last layer may have a mask of its own; an encoder-decoder has one for each side."""
    most = 3 if "Generation" in case[0] else 2
    assert steps[case]["masks"] <= most < max(3, steps[case]["names"].get("masked attention", 9))


@of_batch(*on_cuda.BATCHES)
def test_seeds_are_drawn_once(steps, case):
    """By each backbone, and by its embeddings; joint training also draws sample indices."""
    name, names = case[0], steps[case]["names"]
    backbones = 2 if "Generation" in name or "Joint" in name else 1
    embeddings = names.get("embedding_layer_norm_fwd", 0)
    assert embeddings == (0 if _has_lookups(name) else backbones)
    drops = 0 if "Albert" in name else embeddings
    assert names["randint"] == backbones + drops + ("Joint" in name)


@of_batch("padded", "positions")
def test_every_layer_runs_by_functions(steps, case):
    """A norm follows each of its blocks; a decoder with an encoder has three."""
    name, names = case[0], steps[case]["names"]
    norms = sum(names.get(f"dropout_add_{kind}_norm_fwd", 0) for kind in ("layer", "rms"))
    assert norms == LAYERS * (5 if "Generation" in name else 4 if "Joint" in name else 2)


def _has_lookups(name):
    """Whether the embeddings of a model are modules, not one operator."""
    return any(family in name for family in ("GPT", "T5", "Bart"))


@of_batch("padded")
def test_each_table_of_embeddings_sorts_its_ids_once(steps, case):
    name = case[0]
    names = steps[case]["names"]
    if not _has_lookups(name):  # the operator sorts once for a table
        assert names["embedding_layer_norm_bwd"] == names["embedding_layer_norm_fwd"]
    tables = 2 if "T5" in name or "Bart" in name else 1 if "GPT" in name else 0
    assert names.get("embedding_dense_backward", 0) == tables  # of positions


@of_batch(*on_cuda.BATCHES)
def test_the_gradient_of_all_words_is_written_once(steps, case):
    """By the head; the rows of the lookups are added in place. A second model, which has no head,
    or one of its own, has a sum of its own."""
    (name, _), tables = case, dict(steps[case]["tables"])
    heads = tables.pop("linear_cross_entropy_fwd", 0)
    assert tables.pop("linear_cross_entropy_bwd", 0) == heads
    for lookup in ("embedding", "embedding_layer_norm_fwd", "embedding_layer_norm_bwd"):
        tables.pop(lookup, 0)
    if not heads:
        return
    lookups = 2 if "T5" in name or "Bart" in name else 1
    assert tables.pop("add_rows_") == lookups
    assert tables == ({"add": heads} if "Joint" in name else {})
