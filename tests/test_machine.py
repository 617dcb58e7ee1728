"""fastplm._machine: memory that a process keeps, and names of devices."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

import fastplm
from fastplm import _extension, _machine
from fastplm.finetune.run import Finetuning
from fastplm.pretrain.stream import TextRun
from fastplm.run.threads import computing

#: Steps of a process that allocates 64 MiB in each, and 40 blocks of a MiB; what they cost.
STEPS = """
import resource, sys, torch, fastplm
KEEP
def step():
    torch.ones(16 << 20)
    blocks = [torch.ones(1 << 18) for _ in range(40)]
def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps): step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(10))
"""
LACKING = _extension.lacks("keep_memory", "CompositeExplicitAutograd")


def faults(keep: str, **variables: str) -> int:
    code = STEPS.replace("KEEP", keep)
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(LACKING is not None, reason=f"{LACKING}")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc gives memory back")
@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_that_is_kept_has_no_new_pages(huge_pages):
    """Steps that are alike write to pages that are there: 25,000 of 4 KiB in each without it."""
    plain = faults("")
    kept = faults(f"assert fastplm.keep_memory(huge_pages={huge_pages})")
    assert plain > 100_000 > 1000 > kept


def test_no_addresses_are_added_where_linux_counts_them(monkeypatch):
    assert _machine._addresses() <= 1 << 36
    monkeypatch.setattr(_machine.Path, "read_text", lambda path, encoding: "2\n")
    assert _machine._addresses() == 0


def test_commands_keep_memory(monkeypatch):
    found = []
    monkeypatch.setattr(fastplm, "keep_memory", lambda **options: found.append(options))
    with computing(1):
        pass
    for run in (TextRun, Finetuning):
        with computing(1, huge_pages=run.huge_pages):
            pass
    assert [each["huge_pages"] for each in found] == [False, True, False]


def test_the_name_of_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert _machine.device_label(torch.device("cuda", 1)) == "cuda:1 (GPU 1)"
    assert _machine.device_label(torch.device("cpu")) == "cpu"
