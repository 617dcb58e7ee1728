"""Calls of csrc/ in threads with small stacks, and without the memory that they ask for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastplm import _extension

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(_extension.lacks("linear", "CPU") is not None, reason="csrc/ is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stacks and loader of Linux"),
]
FOLDER = Path(__file__).parent
#: Of a CPU with less, PyTorch's own kernels at a level end the process (SIGILL).
HAS = {
    "default": True,
    "avx2": torch.cpu._is_avx2_supported(),
    "avx512": torch.cpu._is_avx512_supported(),
}
HIGHEST = max((level for level, has in HAS.items() if has), key=list(HAS).index)
LEVELS = [
    pytest.param(level, marks=pytest.mark.skipif(not has, reason=f"this CPU has no {level}"))
    for level, has in HAS.items()
]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
#: What PyTorch says of its own tensors, and csrc/ of all that it allocates.
REFUSED = re.compile(
    r"RuntimeError: (\[enforce fail at alloc_cpu\.cpp:\d+\] .*|fastplm_C::\w+: )"
    r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes\. .+"
)

#: Any number of dimensions comes before the last one; and a mask of no keys may have any others.
LEADING = {f"input {what}" for what in ("a row", "one more dimension", "without 0", "without 1")}
NO_KEYS = {f"{mask} {dim}" for mask in ("mask", "states_mask") for dim in range(3)}
#: What may change alone: an argument, and a dimension or how its shape changes.
FREE = {
    "attention": {"query 0", "query 2", "bias_weight 0", "buckets 0"},
    "attention_backward": {"bias_weight 0", "buckets 0"},
    "disentangled_attention": {"buckets 0", "cu_seqlens 0"},
    "disentangled_attention_backward": {"buckets 0", "cu_seqlens 0"},
    "replaced_token_loss_backward": {"slope 0"},
    "gather_rows": {"input 0", "input 1", "input columns", "positions 0"},
    "gather_rows_backward": {"grad_out 1"},
    "linear": {"input 0", "input 1", "weight 0", *LEADING},
    "linear_int8": {"input 0", "input 1", "input 2", "scale 0", *LEADING},
    "mask_tokens": {"special_ids 0"},
    "corrupt_spans": {"input_ids 0", "input_ids 1", "sentinel_ids 0"},
    "bart_noise": {"input_ids 0", "input_ids 1", "sentence_end_ids 0", "special_ids 0"},
    "pack_sequences": {"lengths 0"},
    "sentence_chunks": {"documents 0", "out 1", "sentences 0"},
    "softmax_statistics": {"logits 0", "logits 1", "logits columns"},
    "encoder": {"cu_seqlens 0"},
    "backbone": {"embeddings 0"},
    "decoder_layer": NO_KEYS,
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "calls_of_csrc.py"), *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_stack_of_64_kb_is_enough(level):
    """PyTorch's threads have it, too. An array of 96 KB on the stack ended the process."""
    done = run("small_stacks", ATEN_CPU_CAPABILITY=level, OMP_NUM_THREADS="2", OMP_STACKSIZE="64K")
    *cases, missing = map(json.loads, done.stdout.splitlines() or ["null"])
    assert done.returncode == 0, f"{missing}: {done.returncode}\n{done.stderr}"
    assert len(cases) > 50 and not missing, missing


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
def test_refused_memory_is_an_error_in_the_words_of_pytorch(tmp_path):
    library = tmp_path / "refuse_memory.so"
    build = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", str(FOLDER / "refuse_memory.cpp")]
    subprocess.run([*build, "-o", str(library), "-ldl"], check=True)
    done = run("refused_memory", str(library), LD_PRELOAD=str(library), OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["changed"]
    assert not [text for text in found["said"] if not REFUSED.fullmatch(text)]
    named = {name for text in found["said"] for name in re.findall(r"fastplm_C::(\w+)", text)}
    assert {"linear", "linear_int8", "attention", "backbone", "decoder_layer"} <= named


@pytest.mark.parametrize("level", LEVELS)
def test_no_operator_reads_one_dtype_as_another(level):
    """A tensor of a smaller dtype ends where its memory does; it was read as bf16."""
    done = run("wrong_types", ATEN_CPU_CAPABILITY=level, OMP_NUM_THREADS="1")
    *cases, taken = map(json.loads, done.stdout.splitlines() or ["null"])
    assert done.returncode == 0, f"{taken}: {done.returncode}\n{done.stderr}"
    assert len(cases) > 500
    wrong = re.compile(r"torch\.(bool|u?int|float8|complex|float64)")
    # gather_rows copies bytes of any dtype, its backward takes fp64; ids and masks may be integers.
    right = re.compile(
        r"gather_rows input |gather_rows_\w+ grad_out torch.float64|backbone "
        r"|\w+ input_ids torch.int32"
    )
    assert not [case for case in taken if wrong.search(case) and not right.match(case)]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize(
    "level",  # the highest one that this CPU has every day, the others in the slow lane
    [
        pytest.param(level, marks=[] if level == HIGHEST else pytest.mark.slow)
        for level, has in HAS.items()
        if has
    ],
)
def test_no_operator_leaves_the_memory_of_its_tensors(level, tmp_path):
    """Calls with one wrong shape, stride, index or count, or without a tensor, of tensors between
    pages that end the process. ``bias_gelu`` and ``product`` wrote behind theirs."""
    library = tmp_path / "guarded_memory.so"
    build = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", str(FOLDER / "guarded_memory.cpp")]
    subprocess.run([*build, "-o", str(library)], check=True)
    variables = dict(ATEN_CPU_CAPABILITY=level, OMP_NUM_THREADS="1", LD_PRELOAD=str(library))
    done = run("wrong_shapes", str(library), **variables)
    assert done.returncode == 0, done.stderr
    missing, *found = map(json.loads, done.stdout.splitlines())
    assert not missing and len(found) > 25
    assert not {one["operator"]: one["ended"] for one in found if one["ended"]}
    for one in found:
        taken = {re.sub(r"size \d+ of ", "", case) for case in one["taken"]}
        assert taken <= FREE.get(one["operator"].split("::")[1], set()), one["operator"]


def test_a_call_gives_most_of_its_memory_back():
    """The states of 512 rows of BERT-base stayed with each thread that called: 16 MB."""
    done = run("memory_left", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4 and max(found.values()) < 3 << 20, found
