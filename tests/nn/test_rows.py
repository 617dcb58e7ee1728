"""Numbers of rows that recur, for products that a CPU compiles for each shape."""

from __future__ import annotations

import pytest
import torch

from fastplm._machine import computes_in
from fastplm.models._ragged import RaggedBatch, unpadded
from fastplm.nn._rows import bucketed_rows, labelled_positions

MANY = 1 << 30


def test_few_numbers_serve_all_batches():
    rounded = [bucketed_rows(count, MANY) for count in range(1, 5000)]
    assert rounded[:31] == list(range(1, 32)) and rounded == sorted(rounded)
    assert all(0 <= more - count <= count / 16 for count, more in enumerate(rounded, 1))
    assert len({more for more in rounded if 512 < more <= 1024}) == 16
    assert [bucketed_rows(count, 1010) for count in (999, 1010)] == [1010, 1010]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_slots_are_added_for_bf16_alone(dtype, how):
    lengths = torch.tensor([33, 40, 2, 28])  # 103 tokens
    mask = torch.arange(40) < lengths[:, None]
    weights = dtype if how == "weights" else torch.float32
    casts = how == "autocast" and dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        rows, _ = unpadded(mask, None, None, dtype=weights)
        positions = labelled_positions(torch.where(mask, 1, -100), exact=False)
        assert len(labelled_positions(torch.where(mask, 1, -100))) == 103
    spare = int(dtype is torch.bfloat16 and computes_in(dtype))
    assert len(rows.positions) == 103 + spare and (rows.positions[103:] == -1).all()
    assert rows.cu_seqlens.tolist() == [0, 33, 73, 75, 103] and rows.key_mask is None
    if how == "autocast":  # labels have no weights
        assert torch.equal(positions, rows.positions)
    given, _ = unpadded(mask, None, 110)
    assert len(given.positions) == 110, "a capacity is what it says"


def test_masked_rows_stay_masked_beside_spare_slots(spare_slots):
    mask = torch.arange(40) < torch.tensor([33, 40, 2, 28])[:, None]
    kept = mask.roll(1, 0)
    (rows, _), exact = unpadded(mask, kept, None), RaggedBatch.of(mask, kept)
    assert torch.equal(rows.key_mask, torch.nn.functional.pad(exact.key_mask, (0, 2)))
    assert torch.equal(rows.positions, torch.nn.functional.pad(exact.positions, (0, 2), value=-1))
    assert not exact.key_mask.all()
