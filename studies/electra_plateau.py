"""When does the discriminator of an ELECTRA learn to detect? Its curve in several pre-trainings.

    python studies/electra_plateau.py RUN [RUN ...] --out electra-plateau

A RUN is the folder of a finished ``fastplm pretrain --arch electra-…``. Its *gain* is the share of
the best constant answer's loss that the discriminator saves, over the training's own replacements.
Frequent tokens alone give some hundredths. OUT.tsv has what differs between the runs, the step from
which on the gain is above a twentieth, and what held-out text says; OUT.png has the gains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plateau import Curve, Row, compare, smoothed

SHOWN = ("layers", "electra_generator", "generator_size", "electra_sharing", "rtd_weight", "lr")
SHOWN += ("mlm_probability", "mask_replace_prob", "block_size", "short_block_size", "seed")
_LEARNED = 0.05


def gains(history: list[dict[str, Any]]) -> Curve:
    found = []
    for entry in history:
        share = 1 - entry["accuracy_of_always_original"]
        constant = -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)
        found.append((entry["step"], 1 - entry["rtd_loss"] / constant))
    return smoothed(found)


def learned(curve: Curve) -> int | None:
    """The step from which on all gains are above ``_LEARNED``, if there is one."""
    found = None
    for step, gain in reversed(curve):
        if gain <= _LEARNED:
            break
        found = step
    return found


def row(run: Path) -> Row:
    metrics = json.loads((run / "metrics.json").read_text())
    settings, held_out = metrics["arguments"], metrics["held_out"]
    curve = gains(metrics["history"])
    found = {name: settings.get(name) for name in SHOWN}
    words = held_out["words"]
    found |= {
        "steps": metrics["history"][-1]["step"],
        "tflop": round(metrics["flops"] / 1e12, 1),
        "learned_at_step": learned(curve),
        "gain_at_the_end": round(curve[-1][1], 4),
        "balanced_accuracy": round(words["balanced_accuracy"], 4),
        "generator_loss": round(held_out["mlm_loss"], 3) if "mlm_loss" in held_out else None,
        "unigram": round(held_out["unigram_loss"], 3),
        "bigram": round(held_out["bigram_loss"], 3),
        "cpu_s": round(metrics["train_seconds"]),
        **{name: metrics[name] for name in ("precision", "device")},
    }
    return found, curve


def label(row: dict[str, Any]) -> str:
    """What a run is, in a few words."""
    generator = "unigram" if row["electra_generator"] == "unigram" else row["generator_size"]
    shared = ", one encoder" if row["electra_sharing"] == "all" else ""
    masks = f"{row['mlm_probability'] or 0.15:.0%} chosen"
    kept = f", {1 - row['mask_replace_prob']:.0%} of them kept" if row["mask_replace_prob"] else ""
    short = f", first {row['short_block_size']} tokens" if row["short_block_size"] else ""
    what = f"{row['layers']} layers, generator {generator or 0.25}{shared}, {masks}{kept}{short}"
    return f"{what}, rate {row['lr']:g}"


def draw(axes: Any, found: Sequence[Row]) -> None:
    for each, curve in found:
        steps, values = zip(*curve, strict=True)
        axes.plot(steps, [100 * value for value in values], linewidth=1.2, label=label(each))
    axes.set(xlabel="step", ylabel="gain over the best constant answer (%)", ylim=(-2, None))
    axes.figure.set_size_inches(8, 4.2 + 0.18 * len(found))
    below = {"loc": "upper left", "bbox_to_anchor": (0, -0.14)}
    axes.legend(frameon=False, fontsize=9, **below)


if __name__ == "__main__":
    compare(__doc__.splitlines()[0], row, draw)
