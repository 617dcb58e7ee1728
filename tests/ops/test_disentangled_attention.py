"""ops.disentangled_attention against its reference, and its reference against DeBERTa's layers."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DebertaV2Config
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

import fastplm
from fastplm import ops
from fastplm.reference.disentangled_attention import (
    disentangled_attention_ref,
    disentangled_buckets,
)
from fastplm.testing import assert_within_budget
from fastplm.triton_kernels import disentangled_attention as kernels
from fastplm.triton_kernels._launch import record_launches

from ..pairwise import pairwise
from .test_attention import NAN, hide, pack_rows, up_to

BACKENDS = ("cpp", "triton")
ROWS = ("query", "key", "value")
TABLES = ("pos_key", "pos_query")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TERMS = {"both": TABLES, "c2p": TABLES[:1], "p2c": TABLES[1:]}
#: (rows of the tables, max_distance): all distances have a row; they share some; all are beyond.
BUCKETS = {"exact": (200, 0), "shared": (16, 24), "clamped": (12, 0)}

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def run(backend: str, **inputs):
    if backend == "cpp" and inputs["query"].is_cuda:
        pytest.skip("the cpp backend is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.disentangled_attention(**inputs)


def leaves(inputs: dict) -> tuple[str, ...]:
    return tuple(name for name in (*ROWS, *TABLES) if inputs[name] is not None)


def check(backend: str, inputs: dict) -> None:
    candidate = functools.partial(run, backend)
    assert_within_budget(candidate, disentangled_attention_ref, inputs, wrt=leaves(inputs))


def make(
    device,
    seqlen=33,
    *,
    batch=2,
    heads=2,
    head_dim=16,
    dtype=torch.float32,
    terms=TABLES,
    buckets=BUCKETS["shared"],
    dropout=False,
) -> dict:
    def draw(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    rows, furthest = buckets
    inputs = {name: draw(batch, heads, seqlen, head_dim) for name in ROWS}
    inputs |= {name: draw(rows, heads, head_dim) if name in terms else None for name in TABLES}
    inputs["max_distance"] = furthest
    if dropout:
        inputs |= dict(dropout_p=0.1, seed=-3)
    return inputs


def pack(inputs: dict, lengths, spare=3) -> dict:
    """The packed call of the first rows of a dense one; spare rows hold NaN."""
    packed, longest = dict(inputs), inputs["query"].shape[2]
    for name in ROWS:
        packed[name] = pack_rows(inputs[name], lengths, spare)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed |= dict(cu_seqlens=ends.to(inputs["query"].device), max_seqlen=longest)
    if "key_mask" in inputs:
        seen = inputs["key_mask"][up_to(lengths, longest).to(inputs["key_mask"].device)]
        packed["key_mask"] = nn.functional.pad(seen, (0, spare), value=True)
    return packed


def out_and_grads(backend: str, inputs: dict, upstream) -> tuple:
    names = leaves(inputs)
    inputs = inputs | {name: inputs[name].detach().requires_grad_() for name in names}
    out = run(backend, **inputs)
    return out.detach(), dict(
        zip(names, torch.autograd.grad(out, [inputs[n] for n in names], upstream), strict=True)
    )


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buckets", "furthest", "shared", "terms", "seqlen"),
    [
        (8, 20, True, "c2p|p2c", 33),
        (-1, 12, False, "c2p|p2c", 20),
        (256, -1, True, "c2p|p2c", 530),
        (8, 20, False, "c2p", 17),
        (8, 20, False, "p2c", 30),
    ],
)
def test_the_reference_is_debertas_attention(buckets, furthest, shared, terms, seqlen):
    config = DebertaV2Config(
        **dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=1, share_att_key=shared),
        **dict(relative_attention=True, position_buckets=buckets, pos_att_type=terms),
        **dict(max_relative_positions=furthest, intermediate_size=8),
    )
    encoder = DebertaV2Encoder(config).double().eval()
    for weight in encoder.parameters():
        nn.init.normal_(weight, std=0.3)
    layer, table = encoder.layer[0].attention.self, encoder.get_rel_embedding()
    hidden, mask = torch.randn(2, seqlen, 48).double(), up_to((seqlen, 9), seqlen)
    expected, _ = layer(
        hidden,
        encoder.get_attention_mask(mask.long()),
        relative_pos=encoder.get_rel_pos(hidden),
        rel_embeddings=table,
    )

    def heads(dense, rows):
        return dense(rows).unflatten(-1, (4, 12))

    prefix, found = "" if shared else "pos_", []
    for term, name in (("c2p", "key"), ("p2c", "query")):
        dense = getattr(layer, f"{prefix}{name}_proj") if term in terms else None
        found.append(None if dense is None else heads(dense, table))
    rows = [
        heads(dense, hidden).transpose(1, 2)
        for dense in (layer.query_proj, layer.key_proj, layer.value_proj)
    ]
    furthest = layer.max_relative_positions * (buckets > 0)
    for attend in (ops.disentangled_attention, disentangled_attention_ref):
        out = attend(*rows, *found, key_mask=mask, max_distance=furthest)
        # The parent rounds the root in its scale to fp32.
        torch.testing.assert_close(
            out.transpose(1, 2).flatten(2)[mask], expected[mask], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_grow_with_the_distance(name):
    rows, furthest = BUCKETS[name]
    for seqlen in (1, 2, 40, 300):
        buckets = disentangled_buckets(rows, furthest, seqlen)
        assert len(buckets) == 2 * seqlen - 1 and buckets[seqlen - 1] == rows // 2
        assert (buckets.diff() >= 0).all() and buckets.min() >= 0 and buckets.max() < rows


# --- every combination ----------------------------------------------------------------------------


@pairwise(
    3,
    backend=BACKENDS,
    layout=("dense", "key mask", "packed", "packed key mask"),
    terms=TERMS,
    buckets=BUCKETS,
    dropout=(False, True),
    dtype=DTYPES,
)
def test_every_combination(device, backend, layout, terms, buckets, dropout, dtype):
    inputs = make(device, 29, dtype=dtype, terms=terms, buckets=buckets, dropout=dropout)
    if "key mask" in layout:  # holes, and a sample with few keys
        key_mask = torch.rand(2, 29) < 0.6
        key_mask[0, :9], key_mask[1, 1:] = False, False
        inputs = hide(inputs, key_mask)
    if dropout:
        inputs["sample_index"] = torch.tensor([4, 2**40 + 1], device=device)
    check(backend, pack(inputs, (12, 29)) if "packed" in layout else inputs)


@pairwise(
    backend=BACKENDS,
    seqlen=(1, 2, 15, 63, 65, 130),
    buckets=BUCKETS,
    terms=TERMS,
    head_dim=(1, 16, 40, 64),
)
def test_lengths_and_head_dims(device, backend, seqlen, buckets, terms, head_dim):
    inputs = make(device, seqlen, batch=1, head_dim=head_dim, terms=terms, buckets=buckets)
    check(backend, inputs)


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_longer_sequences(device, backend, head_dim, dtype):
    inputs = make(device, 257, batch=1, heads=1, head_dim=head_dim, dtype=dtype)
    check(backend, pack(inputs, (257,)))


@each_backend
def test_more_sequences_than_programs(device, backend):
    """The gradients of the tables are sums of programs, each of several sequences."""
    inputs = make(device, 12, batch=11)
    check(backend, pack(inputs, (3, 0, 12, 7, 1, 9, 12, 2, 5, 8, 4)))


@each_backend
@pytest.mark.parametrize("empty", ("batch", "rows", "lengths"))
def test_empty(device, backend, empty):
    inputs = make(device, 0 if empty == "rows" else 5, batch=0 if empty == "batch" else 2)
    if empty == "lengths":
        check(backend, pack(inputs, (0, 0)))
        check(backend, pack(inputs, (0, 0)) | dict(max_seqlen=0))
    else:
        check(backend, inputs)


@each_backend
def test_rows_that_may_attend_to_nothing_are_0(device, backend):
    inputs = hide(make(device, 20), up_to((20, 0), 20))
    out, grads = out_and_grads(backend, inputs, torch.ones(2, 2, 20, 16, device=device))
    assert not out[1].any() and out[0].isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not any(grads[name][1].any() for name in ROWS)


# --- what must be the same bits -------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("dropout", (False, True))
def test_packed_and_padded_give_the_same_bits(device, backend, dropout):
    lengths, longest = (5, 40, 17), 40
    exists = up_to(lengths, longest).to(device)
    inputs = hide(make(device, longest, batch=3, dropout=dropout), exists)
    upstream = torch.randn(3, 2, longest, 16, device=device) * exists[:, None, :, None]
    out, grads = out_and_grads(backend, inputs, upstream)
    packed = {name: one for name, one in pack(inputs, lengths).items() if name != "key_mask"}
    rows = pack_rows(upstream, lengths, 3).nan_to_num(7.0)  # nothing reads those of spare rows
    packed_out, packed_grads = out_and_grads(backend, packed, rows)
    total = sum(lengths)
    assert torch.equal(packed_out[:total], pack_rows(out, lengths))
    assert not packed_out[total:].any()
    for name in ROWS:
        assert torch.equal(packed_grads[name][:total], pack_rows(grads[name], lengths)), name
        assert not packed_grads[name][total:].any()
    for name in TABLES:
        assert torch.equal(packed_grads[name], grads[name]), name


@each_backend
def test_it_repeats_bit_for_bit_on_any_number_of_threads(device, backend):
    inputs = pack(make(device, 70, batch=9, dropout=True), (70, 3, 64, 65, 1, 33, 7, 40, 12))
    upstream, found = torch.randn(inputs["query"].shape, device=device), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out, grads = out_and_grads(backend, inputs, upstream)
            found.append((out, *grads.values()))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@each_backend
def test_dropout_drops_what_the_reference_drops(device, backend):
    inputs = make(device, 64, dropout=True)
    inputs["value"] = torch.eye(64, device=device).expand(2, 2, 64, 64)
    inputs |= {n: torch.zeros(2, 2, 64, 64, device=device) for n in ROWS[:2]}
    inputs |= {name: torch.zeros(16, 2, 64, device=device) for name in TABLES}
    out = run(backend, **inputs)
    assert torch.equal(out == 0, disentangled_attention_ref(**inputs) == 0)
    assert 0.05 < (out == 0).float().mean() < 0.15


# --- memory and words -----------------------------------------------------------------------------


def test_nothing_of_the_size_of_the_scores_is_kept(device):
    inputs = make(device, 300)
    inputs |= {name: inputs[name].requires_grad_() for name in leaves(inputs)}

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes = [one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            self.most = max(self.most, *sizes, 0)
            return result

    with Largest() as mode:
        run("cpp", **inputs).sum().backward()
    assert mode.most <= 2 * 300 * 2 * 16


def test_a_nan_in_a_table_reaches_the_rows_at_its_distance_alone():
    inputs = make("cpu", 20, buckets=BUCKETS["exact"], terms=TABLES[:1])
    inputs["pos_key"][100 + 15] = NAN  # queries 15 and later see a key so far before them
    out = run("cpp", **inputs)
    assert out[:, :, :15].isfinite().all() and out[:, :, 15:].isnan().all()


def test_the_sums_of_the_tables_do_not_grow_with_the_batch():
    """The backward's own memory: each program has sums of all places of its head."""
    sizes = []
    for batch in (2, 64):
        call = SimpleNamespace(
            query=torch.empty((batch, 2, 100, 16), device="meta"),
            key_mask=None,
            cu_seqlens=None,
            seed=None,
            dropout_threshold=0,
            scale=0.2,
            buckets=torch.zeros(199, dtype=torch.int64, device="meta"),
        )
        call.key = call.value = call.query
        call.pos_key = call.pos_query = torch.empty((200, 2, 16), device="meta")
        ends = torch.empty(201, dtype=torch.int32, device="meta")
        with record_launches(90) as launches:
            out, stats = kernels.disentangled_attention_fwd(call)
            kernels.disentangled_attention_bwd(out, call, out, stats, ends)
        given = next(one.arguments for one in launches if "dpk_ptr" in one.arguments)
        sizes.append((given["dpk_ptr"].shape, given["dpq_ptr"].shape))
    assert sizes[0] == sizes[1]
