"""What the figures of held-out text say: which learning rate is best, and whether a budget speaks.

No other module of studies knows the names of these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fastplm.pretrain.objectives import OBJECTIVES
from fastplm.pretrain.settings import COLLAPSED

#: Figures by their names, as a run of pre-training or distillation gives them.
HeldOut = Mapping[str, float]
#: Figures of which less is more end so.
LOSSES = ("loss", "perplexity")
#: What "clearly" means of a loss in the rule of a budget that can speak, see ``too_early``.
CLEAR_NATS = 0.05
#: A balanced accuracy that is clearly above .5.
CLEAR_BALANCED = 0.55
#: The losses of models that know no context, or one token of it.
_PLATEAUS = ("unigram_loss", "bigram_loss")
#: Losses that are no part of what a training minimises.
_BESIDE = (*_PLATEAUS, "words_loss", "discriminator_chosen_loss")
#: Figures that stay out of the table: most are of all tokens, of which few can be replaced.
_LEFT_OUT = (*_PLATEAUS, "words_loss", "balanced_accuracy", "words_balanced_accuracy_error")
#: The losses that a training must bring below the plateaus.
_TOKEN_LOSSES = (
    *dict.fromkeys(kind.token_loss for kind in OBJECTIVES),
    *("discriminator_mlm_loss", "discriminator_chosen_loss"),
)


def shown(held_out: Iterable[str]) -> list[str]:
    """The names of the figures that a table shows."""
    ends = ("_loss", "_accuracy")
    return [name for name in held_out if name.endswith(ends) and name not in _LEFT_OUT]


def loss_of_choice(held_out: HeldOut) -> float | None:
    """The loss of held-out text that a learning rate is chosen by; None if there is none.

    All losses that a training minimises together; but of ELECTRA, whose discriminator detects what
    its generator writes, the generator's alone. The worse a generator, the easier it is to detect,
    so that by the sum of the two the best rate would be one that leaves the generator untrained.
    What ``detects`` says comes first, as a rate may suit the generator alone.
    """
    if "rtd_loss" in held_out and "mlm_loss" in held_out:
        return held_out["mlm_loss"]
    names = [name for name in held_out if name.endswith("_loss") and name not in _BESIDE]
    return sum(held_out[name] for name in names) if names else None


def detects(held_out: HeldOut) -> bool:
    """Whether the discriminator of a training, if it has one, tells replaced tokens from others."""
    return held_out.get("words_balanced_accuracy", 1.0) >= CLEAR_BALANCED


def too_early(held_out: Sequence[HeldOut]) -> tuple[str, ...]:
    """Why the trainings of a variant say nothing yet of an order; nothing where they do.

    The loss of held-out tokens must be at least ``CLEAR_NATS`` below that of a unigram's and of a
    bigram's on the same tokens, at each seed. In ELECTRA's joint training this holds for a
    discriminator that predicts tokens (where it predicts all of them, its softmax, without copies,
    over those that the generator had to predict); one that detects them must have a balanced
    accuracy of ``CLEAR_BALANCED`` at least. Its generator, which is small on purpose and not
    evaluated, must be below the unigram alone. An encoder-decoder can copy most labels: it must be
    below what it would have with the others alone, and its encoder must not give all tokens one
    output.
    """
    found = []
    for each in held_out:
        missing = each.get("missing_share", 1.0)
        of = f" of the {missing:.0%} of its labels that are not in its source"
        for name, plateau in _to_be_beaten(each):
            if each[name] > missing * (each[plateau] - CLEAR_NATS):
                said = f"its {name} is not clearly below the {plateau.replace('_', ' ')}"
                found.append(said + (of if missing < 1 else ""))
        if each.get("encoder_similarity", 0.0) > COLLAPSED:
            found.append("its encoder gives all tokens one output")
        if not detects(each):
            found.append("its discriminator's balanced accuracy is not clearly above .5")
        if not each:
            found.append("it diverged, or no text was held out")
    return tuple(dict.fromkeys(found))


def _to_be_beaten(held_out: HeldOut) -> list[tuple[str, str]]:
    """(loss, plateau) of what must be lower than what."""
    joint = "discriminator_mlm_loss" in held_out or "words_balanced_accuracy" in held_out
    copies = "discriminator_chosen_loss" in held_out
    return [
        (name, plateau)
        for name in _TOKEN_LOSSES
        if name in held_out and not (copies and name == "discriminator_mlm_loss")
        for plateau in (_PLATEAUS[:1] if joint and name == "mlm_loss" else _PLATEAUS)
        if plateau in held_out
    ]
