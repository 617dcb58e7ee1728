"""Each difference from Transformers that docs/models.md lists has a test, and so has each item on
packed rows."""

from __future__ import annotations

import re

from .pages import ROOT

#: {how an item begins: the tests of what it says, by their file in ``tests/models``}
PROOFS = {
    "Hidden states of padding that is left out are 0.": (
        "test_contract::test_a_capacity_or_padding_left_in_changes_nothing",
        "test_contract::test_equals_its_parent",  # with a sequence that has no token
    ),
    "Padding is a row that the mask hides and whose id": (
        "test_read_rows::test_what_the_mask_hides_is_computed_as_in_the_parent",
        "test_read_rows::test_however_the_model_is_made",
        "test_read_rows::test_what_shows_no_ids_is_computed",
    ),
    "DeBERTa: a token that the mask hides": (
        "test_read_rows::test_what_the_mask_hides_is_computed_as_in_the_parent",
        "test_deberta_v2::test_masked_tokens_between_others_are_the_parents",
    ),
    "With `output_hidden_states` a call keeps padding": (
        "test_read_rows::test_hidden_states_have_the_gradients_of_the_parent",
        "test_read_rows::test_the_last_hidden_state_is_under_the_pooler",
    ),
    "While training (`model.train()`), `logits` of a vocabulary head": (
        "test_contract::test_with_labels_logits_are_those_of_the_parent_but_in_training",
        "test_electra::test_the_discriminators_head_sees_the_tokens_alone",
        "test_losses::test_the_loss_is_a_function_of_the_logits_that_are_returned",
    ),
    "A `loss_function` that you set": (
        "test_losses::test_which_parents_ask_their_loss_function",
        "test_losses::test_a_loss_function_of_the_users_is_asked_as_the_parent_asks_it",
        "test_losses::test_each_keyword_does_what_it_does_in_the_parent",
        "test_losses::test_a_loss_type_of_the_configuration_is_that_of_the_parent",
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
    "The length on which rotary positions": (
        "test_described::test_the_length_of_rotary_positions_is_that_of_the_padded_batch",
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
    "A `forward` that you set on the class": (
        "test_layer::test_a_forward_set_on_the_class_of_a_module_is_called_where_the_parents_is",
        "test_layer::test_a_forward_set_on_transformers_class_of_a_layer_is_called",
    ),
    "With caches, with 4-D masks and during tracing": (
        "test_gpt2::test_a_cache_keeps_the_parents_padded_path",
        "test_padding::test_explain_says_why_padding_is_kept",
        "test_integration::test_output_attentions_equal_the_parents_and_warn",
    ),
    "A sliding window of Transformers is a `window`": (
        "test_hf::test_a_sliding_window_is_a_window_of_the_op",
        "test_export::test_a_trace_of_every_class_is_the_parent",
    ),
    "A mask that says for every token which tokens it sees": (
        "test_contract::test_a_mask_of_every_token_for_every_token_equals_the_parents",
        "test_hf::test_rows_that_a_4d_mask_leaves_nothing_are_zero",
    ),
    "Everything that is computed of a text ends with it": (
        "test_packed::test_a_packed_row_equals_the_padded_batch",
        "test_packed::test_labels_of_another_number_of_texts_name_the_cause",
    ),
    "The label of a text's first token": (
        "test_packed::test_a_packed_row_equals_the_padded_batch",
        "test_packed::test_what_the_collator_of_transformers_returns",
    ),
    "An `attention_mask` `[1, N]`": ("test_packed::test_spare_rows_and_a_mask_of_the_row",),
    "Refused, and the error says why": (
        "test_packed::test_two_sides_and_choices_are_refused",
        "test_packed::test_what_does_not_fit_is_refused",
    ),
    "`position_ids` alone that start again": (
        "test_packed::test_what_the_collator_of_transformers_returns",
        "test_gpt2::test_position_ids_that_restart_keep_texts_apart_without_a_cache",
    ),
    "By name, and where `accelerate` replaces only": (
        "test_packed::test_by_name_a_packed_row_equals_the_padded_batch_or_is_refused",
        "test_packed::test_an_attention_without_a_class_takes_more_tokens_than_positions",
    ),
}


def test_every_difference_has_a_test():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    items = []
    for before in ("These are the differences:\n", "\n## Packed rows\n"):
        section = page.split(before)[1].split("\n## ")[0]
        items += [" ".join(item.split()) for item in section.split("\n- ")[1:]]
    begins = tuple(PROOFS)
    assert [item for item in items if not item.startswith(begins)] == [], "add their tests above"
    assert [each for each in begins if not any(item.startswith(each) for item in items)] == []
    for test in sum(PROOFS.values(), ()):
        file, name = test.split("::")
        code = (ROOT / "tests/models" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", code, re.MULTILINE), f"there is no {test}"
