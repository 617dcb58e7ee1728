"""The distances of layers whose outputs are known."""

from __future__ import annotations

import layer_distances
import pytest
import torch
import transformers


def test_a_layer_that_changes_nothing_and_one_that_turns_round(tmp_path):
    """Without attention and feed-forward a layer is its last norm, of what is normed already."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "boat"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=7, num_hidden_layers=2, **sizes)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for layer in model.encoder.layer:
            for dense in (layer.attention.output.dense, layer.output.dense):
                dense.weight.zero_()
                dense.bias.zero_()
        model.encoder.layer[1].output.LayerNorm.weight.neg_()
    model.save_pretrained(tmp_path)
    same, turned = layer_distances.distances(tmp_path, ["the boat", "the boat the boat the"], 6)
    assert same["tokens"] == turned["tokens"] == 4 + 6, "of padding nothing counts"
    assert same["distance"] < 0.01 and same["degrees"] < 0.1
    assert same["norm"] == pytest.approx(4, abs=0.01), "the root of the width"
    assert turned["distance"] == pytest.approx(8, abs=0.01)
    assert turned["degrees"] == pytest.approx(180, abs=0.1)
