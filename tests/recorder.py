"""A stand-in for CUDA graphs on a CPU, which records the operators of a step.

It does what a graph does on a GPU: the captured operators run again on the tensors that they had
then, with the numbers that they had then, and a value that is read ends the capture. So a stale
weight, number or shape gives other results here, too.
"""

from __future__ import annotations

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastplm import graphs, hf
from fastplm.nn import _tied_embedding

#: What waits for the device.
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
READS |= {torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default}
INDEX = torch.ops.aten.index.Tensor


class Recorder(TorchDispatchMode):
    """Records the operators of a block; afterwards all that they wrote is as it was before."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.fresh = [], [], []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op in READS or (
            op is INDEX and any(i is not None and i.dtype is torch.bool for i in args[1])
        ):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        names = [argument.name for argument in op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in op._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given.get(argument.name)):
                    self.before.append((tensor, tensor.clone()))
        there = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        out = op(*args, **kwargs)
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.fresh += [each for each in made if each.untyped_storage().data_ptr() not in there]
        self.calls.append((op, args, kwargs, made))
        return out

    def __enter__(self):
        self.random = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.set_rng_state(self.random)
        with torch.no_grad():
            for tensor, values in reversed(self.before):
                tensor.copy_(values)
            for tensor in self.fresh:  # nothing has run yet
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    @torch.no_grad()
    def replay(self):
        for op, args, kwargs, made in self.calls:
            again = [each for each in tree_leaves(op(*args, **kwargs))]
            again = [each for each in again if isinstance(each, torch.Tensor)]
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record_graphs(monkeypatch):
    """From now on every model may be captured, by a ``Recorder``; and no value is known, as on a
    GPU. Returns the list of what is done, in order: "capture" and "replay"."""
    log = []

    def captured(self, body):
        with Recorder() as recorder:
            outputs = body()
        log.append("capture")

        def replay():
            log.append("replay")
            recorder.replay()

        return replay, outputs

    monkeypatch.setattr(graphs, "_has_graphs", lambda device: True)
    monkeypatch.setattr(graphs._Beside, "captured", captured)
    for name, module in list(sys.modules.items()):
        if name.startswith("fastplm.") and hasattr(module, "values_are_known"):
            monkeypatch.setattr(module, "values_are_known", lambda tensor: False)
    monkeypatch.setattr(_tied_embedding, "_is_known_on_cpu", lambda ids: False)
    monkeypatch.setattr(hf, "is_eager", lambda *tensors: False)  # only asked for masks on a CPU
    return log
