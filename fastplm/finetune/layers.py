"""A learning rate for each layer: the lower the layer, the lower its rate."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch

from fastplm.finetune.settings import FinetuneArguments

#: The number of a layer in the name of one of its weights.
_LAYER = re.compile(r"(?:^|\.)(?:layer|layers|h|block)\.(\d+)\.")


def check_layers(args: FinetuneArguments, config: Any) -> None:
    """Check that each layer of a model can have a rate of its own."""
    layers = not config.is_encoder_decoder and config.model_type != "albert"
    expected = "1 with this model: rates by layer need one stack of layers that share no weights"
    got = f"{args.layer_decay} with --model {args.model}, a {config.model_type}"
    args.check(
        "layer_decay", layers or args.layer_decay == 1, expected, "Leave the option out.", got
    )


def layer_depths(model: Any) -> dict[str, int]:
    """The depth of each weight of a model with n layers.

    0 for embeddings, 1 to n for the layers from the lowest on, n + 1 for what the backbone has
    above them (a pooler, the last norm of GPT-2), n + 2 for the head.
    """
    inside = {id(weight): name for name, weight in model.base_model.named_parameters()}
    numbers = {
        name: int(found[1])
        for name in inside.values()
        if (found := _LAYER.search(name)) is not None
    }
    depths, layers, seen = {}, max(numbers.values()) + 1, False
    for name, weight in model.named_parameters():
        within = inside.get(id(weight))
        if within is None:
            depths[name] = layers + 2
        elif within in numbers:
            depths[name], seen = numbers[within] + 1, True
        else:  # above the layers, if it comes after one of them
            depths[name] = layers + 1 if seen and "embed" not in within else 0
    return depths


def set_layer_rates(optimizer: torch.optim.Optimizer, model: Any, decay: float) -> None:
    """Give each layer ``decay`` times the rate of the layer above it.

    ``rate * decay^(n + 2 - d)`` for a weight of depth d, see ``layer_depths``. The groups of the
    optimizer are divided, those of the head first.

    Args:
        optimizer: one that has not made a step.
        model: whose weights it has.
        decay: above 0, at most 1.

    Source: Clark et al. 2020 (arXiv 2003.10555), appendix B, and the code of its authors
        (``_get_layer_lrs``), where the top layer has ``decay^2``.
    """
    depths = layer_depths(model)
    top = max(depths.values())
    depth_of = {id(weight): depths[name] for name, weight in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        by_depth: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
        for weight in group["params"]:
            by_depth[depth_of[id(weight)]].append(weight)
        for depth, weights in by_depth.items():
            groups.append({**group, "params": weights, "lr": group["lr"] * decay ** (top - depth)})
    optimizer.param_groups[:] = sorted(groups, key=lambda group: -group["lr"])
