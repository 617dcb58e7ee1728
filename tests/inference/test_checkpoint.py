from __future__ import annotations

import pytest
from transformers import BartConfig, BertConfig, GPT2Config, RobertaConfig

from fastplm._checks import DataError
from fastplm.inference._checkpoint import check_out, head_of, whole
from fastplm.inference.arguments import EmbedArguments


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


def test_files_of_results_are_whole_or_as_they_were(tmp_path):
    path = tmp_path / "out.tsv"
    with whole(path) as part:
        part.write_text("first")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), whole(path) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "first" and [*tmp_path.iterdir()] == [path]


def test_a_link_to_nothing_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "out.npy"
    path.symlink_to(tmp_path / "elsewhere")
    arguments = {"model": "model", "data": "data", "out": path}
    with pytest.raises(DataError, match="`out` got .*out.npy, which exists"):
        check_out(EmbedArguments(**arguments), path)
    check_out(EmbedArguments(**arguments, overwrite=True), path)
