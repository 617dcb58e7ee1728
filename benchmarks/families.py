"""Training and inference of encoders beside Transformers' classes, at shares of padding.

    python benchmarks/families.py [--families modernbert esm] [--rounds 7]

Each model has four layers of width 384 with six heads, and the vocabulary of its family. A training
step is the masked-LM loss and its gradients, with the dropout of the family's configuration, 15 %
of the tokens labelled; inference is the backbone without gradients. Both models have the same
weights and see the same texts, 16 x 128 tokens, whose lengths are spread evenly around their mean;
in fp32, on CPUs. Their losses without dropout must agree before anything is timed. Rounds take
turns, and a row has the medians. Transformers has SDPA; of DeBERTa and MPNet it has eager attention
alone.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from fastplm import models
from harness import append_row, machine_folder, machine_line

#: The configuration and the class with a masked-LM head, and what is special about a family.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", {"vocab_size": 250002}),
    "camembert": ("CamembertConfig", "CamembertForMaskedLM", {"vocab_size": 32005}),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", {}),
    "ernie": ("ErnieConfig", "ErnieForMaskedLM", {}),
    "roberta-prelayernorm": (
        "RobertaPreLayerNormConfig",
        "RobertaPreLayerNormForMaskedLM",
        {"vocab_size": 50265},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {"intermediate_size": 576}),
    "nomic-bert": ("NomicBertConfig", "NomicBertForMaskedLM", {}),
    "esm": ("EsmConfig", "EsmForMaskedLM", {"vocab_size": 33, "position_embedding_type": "rotary"}),
    "eurobert": ("EuroBertConfig", "EuroBertForMaskedLM", {"num_key_value_heads": 6}),
    "deberta-v2": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {
            "vocab_size": 128100,
            "position_buckets": 256,
            "max_relative_positions": 512,
            "relative_attention": True,
            "pos_att_type": "p2c|c2p",
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
}
SIZES = {"num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 6}
BATCH, LENGTH, PADDINGS, IGNORED = 16, 128, (0.0, 0.3, 0.5), -100
FIELDS = (
    *("family", "work", "padding", "rows", "transformers_ms", "fastplm_ms", "ratio"),
    *("machine", "level", "threads", "torch", "transformers", "commit", "date"),
)


def pair(family: str) -> tuple[Any, Any]:
    """(Transformers' model, fastplm's with the same weights)."""
    config_name, name, special = FAMILIES[family]
    sizes = SIZES | {"intermediate_size": 1536, "pad_token_id": 1, "mask_token_id": 4} | special
    if family == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    config = getattr(transformers, config_name)(**sizes)
    config.use_cache = False
    torch.manual_seed(0)
    attention = "eager" if family in ("deberta-v2", "mpnet") else "sdpa"
    kind = getattr(transformers, name)
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation=attention)
    ours = getattr(models, name)(config)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def batch(padding: float, vocab: int) -> dict[str, torch.Tensor]:
    mean = LENGTH * (1 - padding)
    spread = min(LENGTH - mean, mean - 2)
    lengths = (mean + spread * torch.linspace(-1, 1, BATCH)).round().long()
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(LENGTH) < lengths[:, None]
    ids = torch.randint(5, vocab, (BATCH, LENGTH), generator=draw).masked_fill(~mask, 1)
    chosen = (torch.rand(ids.shape, generator=draw) < 0.15) & mask
    labels = ids.masked_fill(~chosen, IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def training(model: Any, given: dict[str, torch.Tensor]) -> float:
    model.zero_grad(set_to_none=True)
    loss = model(**given).loss
    loss.backward()
    return loss.item()


def inference(model: Any, given: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model.base_model(given["input_ids"], attention_mask=given["attention_mask"])


def seconds(work: Callable[..., Any], model: Any, given: Any) -> float:
    begun = time.perf_counter()
    work(model, given)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    about = machine_line()
    path = Path(__file__).with_name("results") / machine_folder() / "families.csv"
    for family in args.families:
        both = theirs, ours = pair(family)
        for padding in PADDINGS:
            given = batch(padding, theirs.config.vocab_size)
            expected, found = (training(model.eval(), given) for model in both)
            if abs(expected - found) > 1e-4 * abs(expected):
                raise SystemExit(f"{family}: loss {found}, and not {expected}")
            for work, train in ((training, True), (inference, False)):
                times: tuple[list[float], list[float]] = ([], [])
                for model in both:
                    work(model.train(train), given)
                for _ in range(args.rounds):
                    for model, found_times in zip(both, times, strict=True):
                        found_times.append(seconds(work, model, given))
                before, after = (1e3 * statistics.median(some) for some in times)
                row = {
                    "family": family,
                    "work": work.__name__,
                    "padding": f"{padding:g}",
                    "rows": int(given["attention_mask"].sum()),
                    "transformers_ms": f"{before:.1f}",
                    "fastplm_ms": f"{after:.1f}",
                    "ratio": f"{before / after:.2f}",
                    "level": torch.backends.cpu.get_cpu_capability(),
                    "threads": torch.get_num_threads(),
                    "transformers": transformers.__version__,
                    **{name: about[name] for name in FIELDS if name in about},
                }
                print(" ".join(str(row[name]) for name in FIELDS[:7]), flush=True)
                append_row(path, FIELDS, {name: row.get(name, "") for name in FIELDS})


if __name__ == "__main__":
    main()
