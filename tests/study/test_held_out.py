"""What figures of held-out text say: a learning rate, and a budget that cannot speak."""

from __future__ import annotations

import pytest

from fastplm.study.held_out import loss_of_choice, too_early

PAST = {"mlm_loss": 3.0, "unigram_loss": 6.0, "bigram_loss": 4.5}
#: The figures of an encoder-decoder that can copy seven of ten labels.
COPIED = {"unigram_loss": 6.0, "bigram_loss": 4.5, "missing_share": 0.3, "encoder_similarity": 0.1}


def test_what_a_rate_is_chosen_by():
    """The figures are of ELECTRAs at 1e-3 and 2e-3: the second generator knows no context."""
    plateaus = {"unigram_loss": 6.27, "bigram_loss": 4.54}
    better = {"mlm_loss": 5.19, "rtd_loss": 0.138, "words_loss": 3.9} | plateaus
    worse = {"mlm_loss": 6.33, "rtd_loss": 0.046, "words_loss": 4.1} | plateaus
    assert better["mlm_loss"] + 50 * better["rtd_loss"] > worse["mlm_loss"] + 50 * worse["rtd_loss"]
    assert loss_of_choice(better) == 5.19 < loss_of_choice(worse) == 6.33
    unigram = {"rtd_loss": 0.4, "words_loss": 0.3} | plateaus  # a generator that is not trained
    assert loss_of_choice(unigram) == 0.4
    all_tokens = {"mlm_loss": 5.0, "discriminator_mlm_loss": 1.25, "discriminator_chosen_loss": 4.0}
    assert loss_of_choice(all_tokens) == 6.25
    assert loss_of_choice({"mlm_loss": 4.0, "next_sentence_loss": 0.5}) == 4.5
    assert loss_of_choice(plateaus) is None


@pytest.mark.parametrize(
    "held_out, said",
    [
        ([PAST, PAST], ""),
        ([PAST, PAST | {"mlm_loss": 4.48}], "its mlm_loss is not clearly below the bigram loss"),
        ([PAST | {"mlm_loss": 6.1}], "below the unigram loss"),
        ([PAST | {"words_balanced_accuracy": 0.53}], "balanced accuracy is not clearly above .5"),
        ([PAST | {"words_balanced_accuracy": 0.71}], ""),
        ([PAST | {"words_balanced_accuracy": 0.71, "mlm_loss": 4.9}], ""),
        (
            [PAST | {"words_balanced_accuracy": 0.71, "mlm_loss": 6.1}],
            "its mlm_loss is not clearly below the unigram loss",
        ),
        ([PAST | {"discriminator_mlm_loss": 3.9, "mlm_loss": 4.9}], ""),
        (
            [PAST | {"discriminator_mlm_loss": 4.48, "mlm_loss": 4.9}],
            "its discriminator_mlm_loss is not clearly below the bigram loss",
        ),
        (
            [PAST | {"discriminator_mlm_loss": 1.2, "discriminator_chosen_loss": 4.6}],
            "its discriminator_chosen_loss is not clearly below the bigram loss",
        ),
        ([PAST | {"discriminator_mlm_loss": 1.2, "discriminator_chosen_loss": 4.1}], ""),
        ([{"spans_loss": 3.0}], ""),
        ([COPIED | {"denoise_loss": 1.30}], ""),
        (
            [COPIED | {"denoise_loss": 1.34}],
            "not clearly below the bigram loss of the 30% of its labels that are not in its source",
        ),
        ([COPIED | {"denoise_loss": 1.30, "encoder_similarity": 0.999}], "gives all tokens one"),
        ([{}], "it diverged, or no text was held out"),
    ],
)
def test_a_budget_that_cannot_speak(held_out, said):
    reasons = too_early(held_out)
    assert bool(reasons) == bool(said) and said in " ".join(reasons)
