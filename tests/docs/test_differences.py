"""Each difference from Transformers that docs/models.md lists has a test."""

from __future__ import annotations

import re

from .pages import ROOT

#: {how an item of the list begins: the tests of what it says, by their file in ``tests/models``}
PROOFS = {
    "Hidden states of padding that is left out are 0.": (
        "test_contract::test_a_capacity_or_padding_left_in_changes_nothing",
        "test_contract::test_equals_its_parent",  # with a sequence that has no token
    ),
    "While training (`model.train()`), `logits` of a vocabulary head": (
        "test_contract::test_with_labels_logits_are_those_of_the_parent_but_in_training",
        "test_electra::test_the_discriminators_head_sees_the_tokens_alone",
    ),
    "With labels, a decoder makes no cache": (
        "test_contract::test_a_cache_continues_the_positions",
        "test_gpt2::test_position_ids_that_restart_keep_texts_apart_without_a_cache",
    ),
    "Under Trainer with gradient accumulation": (
        "test_trainer::test_training_losses_are_the_parents",
        "test_integration::test_trainer_accumulates_to_the_gradients_of_one_batch",
    ),
    "Full masks: booleans or integers": (
        "test_contract::test_full_masks_are_read_by_what_they_mean_or_refused",
    ),
    "If no token of a batch has a label": (
        "test_contract::test_without_labels_loss_and_gradients_are_0",
        "test_bert::test_no_pair_labelled_is_loss_0",
        "test_trainer::test_batches_without_labels_are_left_out_of_the_mean",
    ),
    "More tokens than the model has positions": (
        "test_positions::test_the_longest_text",
        "test_positions::test_a_text_after_a_cache",
    ),
    "All models use `num_items_in_batch`": (
        "test_contract::test_accumulated_batches_are_one_batch",
        "test_contract::test_the_loss_of_each_label_adds_up_to_the_mean",
    ),
    "Forward hooks inside a backbone see packed rows": (
        "test_padding::test_padding_is_left_out",
        "test_contract::test_hooks_see_the_parents_rows_when_these_are_asked_for",
    ),
    "With caches, with 4-D masks and during tracing": (
        "test_gpt2::test_a_cache_keeps_the_parents_padded_path",
        "test_padding::test_explain_says_why_padding_is_kept",
        "test_integration::test_output_attentions_equal_the_parents_and_warn",
    ),
    "A sliding window of Transformers is a `window`": (
        "test_hf::test_a_sliding_window_is_a_window_of_the_op",
    ),
    "A mask that says for every token which tokens it sees": (
        "test_contract::test_a_mask_of_every_token_for_every_token_equals_the_parents",
        "test_hf::test_rows_that_a_4d_mask_leaves_nothing_are_zero",
    ),
}


def test_every_difference_has_a_test():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    items = page.split("These are the differences:\n\n- ")[1].split("\n## ")[0].split("\n- ")
    items = [" ".join(item.split()) for item in items]
    begins = tuple(PROOFS)
    assert [item for item in items if not item.startswith(begins)] == [], "add their tests above"
    assert [each for each in begins if not any(item.startswith(each) for item in items)] == []
    for test in sum(PROOFS.values(), ()):
        file, name = test.split("::")
        code = (ROOT / "tests/models" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", code, re.MULTILINE), f"there is no {test}"
