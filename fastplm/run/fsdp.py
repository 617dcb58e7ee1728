"""FSDP2 in a run: Transformers' Trainer and Accelerate shard the model, this says how.

Each layer is a group of its own, and all that is around the layers is in the group of the whole
model, which is gathered before the first layer and kept until the backward is done. So a head reads
the weight of the embeddings, to which its own is tied, without calling their modules.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def layers_of(model: nn.Module) -> list[str]:
    """The names of the classes of a model's layers: of the modules in its outermost lists.

    The layer of a list of one is none: ALBERT's runs many times, and is gathered once.
    """
    found: set[str] = set()
    modules = [model]
    for module in modules:
        if isinstance(module, nn.ModuleList):
            found.update(type(layer).__name__ for layer in module if len(module) > 1)
        else:
            modules += module.children()
    return sorted(found)


def shard_here(trainer: Any) -> None:
    """Let Accelerate shard on CPUs, too, where by itself it would train by DDP and not say so."""
    # Layers return views. Nothing writes to them in place: losses and gradients are those of DDP.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    if state.distributed_type != DistributedType.FSDP:
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        # Whoever asks for the state later gets that of PartialState.
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    # Accelerate's policy for bf16 would make bf16 of all between layers, and of the loss.
    state.fsdp_plugin.mixed_precision_policy = None
    trainer.is_fsdp_enabled = True


@contextlib.contextmanager
def sharding(trainer: Any) -> Iterator[None]:
    """In this block Accelerate shards the model of a trainer, as the top of this file says.

    It finds no embeddings to put into a group of their own, whose hooks would keep a head from the
    fused loss. bf16 is autocast, as without sharding.
    """
    model = trainer.model
    trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    names = ("get_input_embeddings", "get_output_embeddings")
    vars(model).update(dict.fromkeys(names, lambda: None))
    try:
        yield
    finally:
        for name in names:
            del vars(model)[name]


def own(value: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return value.to_local() if isinstance(value, DTensor) else value


def states_of(trained: nn.Module, models: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """The whole weights of models, on the CPU; nothing of a model that is not sharded.

    All processes must call this.

    Args:
        trained: the model that was sharded, of which each is a part.
    """
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without gradients leaves some as they were gathered
    states: dict[str, dict[str, Tensor]] = {}
    for name, model in models.items():
        given = model.state_dict(keep_vars=True)
        if any(isinstance(value, DTensor) for value in given.values()):
            # Of tied weights, which have two names, one is gathered.
            each = {id(value): value for value in given.values()}
            gathered = {key: _whole(value) for key, value in each.items()}
            states[name] = {key: gathered[id(value)] for key, value in given.items()}
    return states


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
