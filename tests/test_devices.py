"""The library's messages about devices and tensors that its kernels do not run on."""

from __future__ import annotations

import importlib
import warnings
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastplm
from fastplm import _backends, _extension, ops
from fastplm._registry import OPS
from fastplm.errors import BackendError, UnsupportedError
from fastplm.ops._attention_call import _bucket_table, _filled_from_cpu
from fastplm.ops._common import csrc_rejects
from fastplm.reference.attention import t5_buckets
from fastplm.triton_kernels import _launch
from fastplm.triton_kernels._launch import nearest_arch, shared_limit, table_arch

GPU = torch.device("cuda", 0)


@pytest.fixture
def looks_up(monkeypatch):
    """Gives devices a compute capability, and clears caches. Returns the devices that are asked."""
    asked = []

    def pretend(major, minor, hip=None):
        def properties(index):
            asked.append(index)
            return SimpleNamespace(major=major, minor=minor)

        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(_backends, "_WHY_NOT_NVIDIA", {})
        return asked

    return pretend


@pytest.mark.parametrize(
    ("major", "minor", "hip", "reason"),
    (
        (7, 5, None, "cuda:0 is sm_75: the kernels need sm_80 or later"),
        (8, 0, None, None),
        (12, 0, None, None),
        (9, 4, "6.4", "ROCm: the kernels are made for NVIDIA GPUs"),
    ),
)
def test_an_old_gpu_and_rocm_are_refused(looks_up, major, minor, hip, reason):
    asked = looks_up(major, minor, hip)
    there = SimpleNamespace(device=GPU)
    assert _backends.why_not_nvidia(GPU) == _backends.why_not_nvidia(GPU) == reason
    assert asked == ([] if hip else [0])  # each device is asked once
    assert _backends.why_not_triton(there, forced=True) == reason
    if "cuda" in OPS["mask_tokens"].backends:
        said = OPS["mask_tokens"].backends["cuda"].rejects((there,), forced=True)
        assert said == reason if reason else "sm_" not in (said or "")


def test_auto_goes_on_where_a_forced_backend_raises(monkeypatch):
    monkeypatch.setattr(_backends, "_WHY_NOT_NVIDIA", {0: "too old"})
    _backends._warn_of_eager.cache_clear()
    with FakeTensorMode():
        call = OPS["gather_rows"].call(
            torch.empty(8, 16, device=GPU), torch.empty(4, dtype=torch.int64, device=GPU)
        )
    with _backends.record_decisions() as decisions:
        with pytest.warns(UserWarning, match="too old"):
            assert OPS["gather_rows"].resolve(call) == "eager"
    assert "not triton: too old" in str(decisions[0])
    with fastplm.use_backend("triton"), pytest.raises(BackendError, match="too old"):
        OPS["gather_rows"].resolve(call)


def test_missing_triton_warns_once_and_names_the_fix(monkeypatch):
    monkeypatch.setattr(_backends, "_WHY_NOT_NVIDIA", {0: None})
    monkeypatch.setattr(_backends, "_HAS_TRITON", False)
    _backends._warn_of_eager.cache_clear()
    there = SimpleNamespace(device=GPU)
    with pytest.warns(UserWarning, match="pip install triton"):
        assert _backends.why_not_triton(there, forced=False) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _backends.why_not_triton(there, forced=False)
        _backends._warn_of_eager.cache_clear()
        _backends.why_not_triton(there, forced=True)  # raises its own error
        cpu = SimpleNamespace(device=torch.device("cpu"))
        _backends.why_not_triton(cpu, forced=False)


@pytest.mark.skipif(_extension._MISSING is not None, reason="csrc/ is not built")
def test_masks_without_cuda_code_warn(monkeypatch):
    monkeypatch.setattr(_backends, "_WHY_NOT_NVIDIA", {0: None})
    monkeypatch.setattr(_extension, "_CUDA_MISSING", "is elsewhere")
    _backends._warn_of_eager.cache_clear()
    rejects, there = csrc_rejects("mask_tokens", "CUDA"), SimpleNamespace(device=GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rejects((there,), forced=True) == "the CUDA code is elsewhere"
    with pytest.warns(UserWarning, match="the CUDA code is elsewhere"):
        rejects((there,), forced=False)


def test_a_dtensor_is_refused_with_the_way_out(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    tensor = pytest.importorskip("torch.distributed.tensor")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = tensor.init_device_mesh("cpu", (1,))
        query = tensor.distribute_tensor(torch.randn(2, 2, 8, 16), mesh, [tensor.Shard(0)])
        ids = tensor.distribute_tensor(torch.zeros(8, dtype=torch.int64), mesh, [tensor.Shard(0)])
        for call in (
            lambda: ops.attention(query, query, query, is_causal=True),
            lambda: ops.gather_rows(query[0, 0], ids),
        ):
            with pytest.raises(UnsupportedError, match=r"to_local\(\).*local_map"):
                call()
        local = query.to_local()
        assert ops.attention(local, local, local, is_causal=True).shape == query.shape
    finally:
        distributed.destroy_process_group()


class Names(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(isinstance(a, torch.Tensor) and a.is_meta for a in args):
            self.seen.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", ((32, True, 128), (32, False, 128), (4, True, 2), (8, 1, 300)))
def test_the_bucket_table_is_filled_where_it_is_used(settings, monkeypatch):
    values = t5_buckets(*settings)
    # The code for GPUs, on a device with values and on one from which nothing can be copied.
    here = SimpleNamespace(type="not cpu")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    assert torch.equal(_filled_from_cpu(values, here), values)
    monkeypatch.undo()
    with Names() as names:
        assert _filled_from_cpu(values, torch.device("meta")).shape == values.shape
    assert names.seen and names.seen <= {"split_with_sizes", "fill_"}


def test_a_bucket_table_of_a_capture_is_not_kept(monkeypatch):
    kept, capturing = {}, True
    monkeypatch.setitem(_bucket_table.__globals__, "_BUCKET_TABLES", kept)
    monkeypatch.setitem(
        _bucket_table.__globals__, "_filled_from_cpu", lambda values, device: values.clone()
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    first = _bucket_table(32, True, 128, GPU)
    assert _bucket_table(32, True, 128, GPU) is not first and not kept
    capturing = False
    table = _bucket_table(32, True, 128, GPU)
    capturing = True
    assert _bucket_table(32, True, 128, GPU) is table


@pytest.mark.parametrize(
    ("arch", "shared", "expected"),
    (
        (80, None, 80),
        (86, None, 86),
        (87, shared_limit(80), 80),  # like sm_86, but with the memory of sm_80
        (89, None, 86),
        (90, None, 90),
        (100, None, 100),
        (103, shared_limit(100), 100),
        (120, None, 120),
        (121, shared_limit(120), 120),
        (130, shared_limit(100), 80),  # an unknown architecture
    ),
)
def test_launch_tables_are_chosen_by_what_a_device_has(arch, shared, expected):
    assert table_arch(arch, shared or shared_limit(arch)) == expected


@pytest.mark.parametrize(
    ("version", "major", "warned"),
    (
        ("3.6.0", 9, True),
        ("3.7.0+git12345", 9, True),
        ("3.7.1", 9, False),
        ("3.10.0", 9, False),
        ("3.7.1", 10, True),
        ("3.9.0", 10, False),
        ("3.6.0", 8, False),
        ("3.6.0", 12, False),
    ),
)
def test_a_triton_without_fences_is_named_once(monkeypatch, version, major, warned):
    memory = shared_limit(10 * major)
    there = SimpleNamespace(major=major, minor=0, shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: there)
    monkeypatch.setattr(_launch.triton, "__version__", version)
    monkeypatch.setattr(_launch, "_table_arch", lru_cache(_launch._table_arch.__wrapped__))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert _launch.arch_of(GPU) == _launch.arch_of(GPU)
    first = {9: "3.7.1", 10: "3.9"}.get(major)
    named = [f"Install Triton {first} or later" in str(each.message) for each in said]
    assert named == [True] * warned


def test_sm_120_takes_no_entry_of_sm_90_or_100():
    """sm_120 is newer, but has neither their instructions nor their memory."""
    assert nearest_arch(120, (80, 86, 90, 100)) == 86
    assert nearest_arch(120, (80, 90, 100, 120)) == 120
    assert nearest_arch(100, (80, 86, 90)) == 90


def test_what_is_made_for_less_shared_memory_serves_no_newer_card():
    """sm_90 without an entry takes the one before, which must not be that of 86."""
    attention, loss = (
        importlib.import_module(f"fastplm.triton_kernels.{op}.configs")
        for op in ("attention", "linear_cross_entropy")
    )
    tables = (*attention._TABLE.values(), loss._TABLE, loss._ROWS_TABLE)
    small = [(table, key) for table in tables for key in table if key[0] == 86]
    assert small and all((90, *key[1:]) in table for table, key in small)
