"""The loss of masked-LM and seq2seq heads under gradient accumulation."""

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
BART = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 20,
}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "d_ff": 16}
HEADS = {
    "AlbertForMaskedLM": {**SIZES, "embedding_size": 16},
    "BartForConditionalGeneration": BART,
    "BertForMaskedLM": SIZES,
    "ElectraForMaskedLM": {**SIZES, "embedding_size": 16},
    "MPNetForMaskedLM": SIZES,
    "RobertaForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0},
    "XLMRobertaForMaskedLM": SIZES,
}


def model_and_batch(name):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**HEADS[name])).eval()
    ids = torch.randint(5, 50, (4, 8))
    labels = ids.where(torch.rand(ids.shape) < 0.5, -100)
    return model, ids, labels


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_is_divided_by_the_labels_of_all_batches(name):
    """As Trainer calls it: the losses of two halves of a batch add up to the loss of the batch."""
    model, ids, labels = model_and_batch(name)
    count = (labels != -100).sum()
    halves = [
        model(input_ids=ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss
        for i in (0, 2)
    ]
    torch.testing.assert_close(sum(halves), model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize("name", HEADS)
def test_without_a_number_the_loss_is_the_mean(name):
    model, ids, labels = model_and_batch(name)
    out = model(input_ids=ids, labels=labels)
    logits, rows = out.logits.flatten(0, 1), labels.flatten()
    expected = torch.nn.functional.cross_entropy(logits, rows, ignore_index=-100)
    torch.testing.assert_close(out.loss, expected)
