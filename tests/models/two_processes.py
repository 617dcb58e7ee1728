"""One of two processes of test_integration.py: ``python two_processes.py RANK FOLDER``.

Each takes its half of a batch; the gradients of DDP and of FSDP2 are written to the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig
from transformers import BertForMaskedLM as TheirBertForMaskedLM

import fastplm
from fastplm.models import BertForMaskedLM

WORLD = 2


def loss_of(model, batch, rank):
    """The loss of this rank's half, scaled as in Trainer: gradients are averaged, losses summed."""
    half = {name: values.chunk(WORLD)[rank] for name, values in batch.items()}
    total = (batch["labels"] != -100).sum()
    return model(**half, num_items_in_batch=total).loss * WORLD


def data_parallel(config, state, batch, rank):
    model = BertForMaskedLM(config).double()
    model.load_state_dict(state)
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped, batch, rank).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def sharded(config, state, batch, rank):
    model = TheirBertForMaskedLM(config).double()
    model.load_state_dict(state)
    fastplm.accelerate(model)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, BertForMaskedLM)
    # The second backward pass meets parameters that were freed and gathered again.
    for _ in range(2):
        model.zero_grad()
        loss_of(model, batch, rank).backward()
    return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


def main(rank: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    given = torch.load(folder / "given.pt")
    config = BertConfig(**given["config"])
    gradients = {
        way.__name__: way(config, given["state"], given["batch"], rank)
        for way in (data_parallel, sharded)
    }
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
