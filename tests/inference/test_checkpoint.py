from __future__ import annotations

import pytest
from transformers import BartConfig, BertConfig, GPT2Config, RobertaConfig

from fastplm.inference._checkpoint import head_of


@pytest.mark.parametrize(
    ("config", "saved", "head"),
    [
        (BertConfig(), None, "MaskedLM"),
        (BertConfig(), "BertForPreTraining", "MaskedLM"),
        (BertConfig(is_decoder=True), None, "CausalLM"),
        (BertConfig(), "BertLMHeadModel", "CausalLM"),
        (RobertaConfig(), "RobertaForCausalLM", "CausalLM"),
        (GPT2Config(), None, "CausalLM"),
        (BartConfig(), None, "Seq2SeqLM"),
    ],
)
def test_which_language_model_a_checkpoint_is(config, saved, head):
    config.architectures = None if saved is None else [saved]
    assert head_of(config) == head
