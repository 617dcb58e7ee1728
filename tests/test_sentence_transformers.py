"""``fastplm.accelerate`` on the objects of sentence-transformers' own release."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import SpladePooling

import fastplm
from fastplm import models
from fastplm._backends import record_notes
from fastplm.nn._rows import kind_of

TEXTS = ["ab cd", "a long text that is here to make the other ones short", "b", "of the b c d"]
PAIRS = [("ab", "cd of it"), ("a long question that has no answer", "b")]


def embedded(model):
    return model.encode(TEXTS)


def scored(model):
    return model.predict(PAIRS)


def weighted(model):
    return model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()


@pytest.mark.parametrize(
    "kind, run",
    [(SentenceTransformer, embedded), (CrossEncoder, scored), (SparseEncoder, weighted)],
)
def test_the_same_results_with_our_classes_inside(kind, run, checkpoint):
    options = {"num_labels": 1} if kind is CrossEncoder else {}
    torch.manual_seed(0)
    stock = kind(str(checkpoint), device="cpu", **options)
    ours = fastplm.freeze(fastplm.accelerate(copy.deepcopy(stock)))
    inner = [kind_of(module) for module in ours.modules()]
    assert models.BertModel in inner and transformers.BertModel not in inner
    with record_notes() as notes, fastplm.use_backend("cpp", "linear"):
        out = run(ours)
    # Not the error budget, as the library takes no fp64; the models are held to it in tests/models.
    np.testing.assert_allclose(out, run(stock), rtol=1e-4, atol=1e-5)
    text = "\n".join(notes)
    assert "padding left out" in text
    if fastplm._extension.lacks("encoder", "CPU") is None:
        assert "layers in one call of csrc/" in text
    np.testing.assert_array_equal(run(fastplm.restore(ours)), run(stock))


@pytest.mark.parametrize(
    "kind, run",
    [(SentenceTransformer, embedded), (CrossEncoder, scored), (SparseEncoder, weighted)],
)
def test_the_same_object_in_8_bits(kind, run, checkpoint, tmp_path):
    """The object computes in 8 bits, saves and loads them, and goes back."""
    options = {"num_labels": 1} if kind is CrossEncoder else {}
    torch.manual_seed(0)
    stock = kind(str(checkpoint), device="cpu", **options)
    ours = fastplm.quantize(fastplm.accelerate(copy.deepcopy(stock)), keep_weights=True)
    fastplm.freeze(ours)
    assert any(kind_of(module) is fastplm.nn.LinearInt8 for module in ours.modules())
    with record_notes() as notes:
        out = run(ours)
    assert np.isfinite(out).all() and not np.array_equal(out, run(stock))
    if fastplm._extension.lacks("encoder", "CPU") is None:
        assert "layers in one call of csrc/" in "\n".join(notes)
    torch.save(ours.state_dict(), tmp_path / "int8.pt")
    other = fastplm.quantize(kind(str(checkpoint), device="cpu", **options))
    other.load_state_dict(torch.load(tmp_path / "int8.pt"))
    np.testing.assert_array_equal(run(fastplm.freeze(fastplm.accelerate(other))), run(ours))
    np.testing.assert_array_equal(run(fastplm.restore(fastplm.dequantize(ours))), run(stock))


# --- rows that somebody reads ---------------------------------------------------------------------

SIZES = dict(vocab_size=21, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(intermediate_size=24, max_position_embeddings=64, initializer_range=0.3)
SIZES |= dict(pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3)
MORE = {"eurobert": dict(num_key_value_heads=2), "modernbert": dict(local_attention=100)}
MORE |= {"t5": dict(d_kv=8, d_ff=24), "albert": dict(embedding_size=8)}
MORE |= {"distilbert": dict(dim=16, n_layers=2, n_heads=2, hidden_dim=24)}
MORE |= {"gpt2": dict(n_positions=64), "esm": dict(mask_token_id=4, token_dropout=True)}
#: The families, by the models without a head.
KINDS = {
    kind.config_class.model_type: kind
    for kind in (getattr(models, name) for name in models.__all__ if name.endswith("Model"))
    if issubclass(kind, transformers.PreTrainedModel)
}
for family in ("bart", "encoder-decoder", "openai-gpt"):  # sentence-transformers has no place
    del KINDS[family]
KINDS["t5"] = models.T5EncoderModel
FAMILIES = sorted(KINDS)
MASKED = [f for f in FAMILIES if f not in ("t5", "gpt2")]
WAYS = ("class", "accelerate", "name")


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """``get(family)``: a folder with a model for masked words, if there is one."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            config = KINDS[family].config_class(**{**SIZES, **MORE.get(family, {})})
            torch.manual_seed(0)
            auto = transformers.AutoModelForMaskedLM if family in MASKED else transformers.AutoModel
            auto.from_config(config).save_pretrained(made[family])
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (made[family] / name).write_bytes((checkpoint / name).read_bytes())
        return str(made[family])

    return get


def as_way(stock, way):
    """A copy of a pipeline, whose model is ours."""
    other = copy.deepcopy(stock)
    if way == "accelerate":
        return fastplm.accelerate(other)
    if way == "name":
        other[0].model.set_attn_implementation("fastplm")
        return other
    theirs = other[0].model
    model = getattr(models, type(theirs).__name__)(copy.deepcopy(theirs.config)).eval()
    model.load_state_dict(theirs.state_dict())
    other[0].model = model
    return other


def hidden_batch():
    """A batch whose mask hides tokens at the right, and the mask of what is read."""
    places = torch.tensor([[1] * 9, [1] * 4 + [2] * 3 + [0] * 2, [1] * 2 + [2] * 7])
    ids = torch.randint(5, 20, places.shape) * (places > 0)
    return {"input_ids": ids, "attention_mask": (places == 1).long()}, (places > 0).long()


def of_hidden(pipeline):
    """What the modules after the model make of a mask that is other than the model's."""
    torch.manual_seed(1)
    features, read = hidden_batch()
    with torch.no_grad():
        features = pipeline[0](features)
        features["attention_mask"] = read
        for module in list(pipeline)[1:]:
            features = module(features)
    return features["sentence_embedding"].numpy()


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def ways_of(family):
    """DeBERTa has attention of its own, without a name."""
    return [way for way in WAYS if way != "name" or family != "deberta-v2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pooling_of_every_family(folder, family):
    inner = modules.Transformer(folder(family), model_kwargs={"attn_implementation": "eager"})
    every = modules.Pooling(16, modules.Pooling.POOLING_MODES)
    later = modules.Pooling(16, modules.Pooling.POOLING_MODES, include_prompt=False)
    dense = modules.Dense(16, 16, module_input_name="token_embeddings")
    for side in ("right", "left"):
        inner.tokenizer.padding_side = side
        for after in ([every], [dense, later]):
            stock = SentenceTransformer(modules=[inner, *after], device="cpu")
            if family == "gpt2":
                stock[0].model.config.use_cache = False
            for way in ways_of(family):
                ours = as_way(stock, way)
                same(ours.encode(TEXTS, prompt="a b "), stock.encode(TEXTS, prompt="a b "))
                if side == "right":
                    same(of_hidden(ours), of_hidden(stock))


@pytest.mark.parametrize("family", MASKED)
def test_every_other_kind_of_every_family(folder, family):
    """SPLADE's logits and the scores of pairs."""
    inner = modules.Transformer(folder(family), transformer_task="fill-mask")
    for pooling in ("max", "sum"):
        stock = SparseEncoder(modules=[inner, SpladePooling(pooling)], device="cpu")
        for way in ways_of(family):
            ours = as_way(stock, way)
            same(weighted(ours), weighted(stock))
            same(of_hidden(ours), of_hidden(stock))
    if hasattr(models, KINDS[family].__name__.removesuffix("Model") + "ForSequenceClassification"):
        stock = CrossEncoder(folder(family), device="cpu", num_labels=1)
        same(scored(fastplm.accelerate(copy.deepcopy(stock))), scored(stock))


EXPANSIONS = {
    "classic": {"strategy": "fixed", "length": 12},
    "at least": {"strategy": "min", "length": 6},
    "attended to": {"strategy": "fixed", "length": 12, "attend": True},
    "with padding": {"strategy": "fixed", "length": 12, "token": "[PAD]"},
}


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_late_interaction(folder, family, expansion):
    inner = modules.Transformer(folder(family), query_expansion=EXPANSIONS[expansion])
    if family == "gpt2":
        inner.model.config.use_cache = False
    after = [modules.Dense(16, 8, module_input_name="token_embeddings", activation_function=None)]
    after += [modules.Normalize(module_input_name="token_embeddings"), MultiVectorMask(["b"])]
    stock = MultiVectorEncoder(modules=[inner, *after], device="cpu")
    for way in ways_of(family):
        if (way, expansion) == ("class", "with padding"):
            continue  # nothing tells such a query's padding from that of a document
        ours = as_way(stock, way)
        for encode in ("encode_query", "encode_document"):
            both = [getattr(each, encode)(TEXTS) for each in (ours, stock)]
            for one, other in zip(*both, strict=True):
                same(one, other)
        with record_notes() as notes:
            ours.encode_document(TEXTS)
        known = way != "name" and expansion != "with padding"
        assert ("padding left out" in "\n".join(notes)) == known


class Everything(torch.nn.Module):
    """A mean over all rows, as a user may write it."""

    def forward(self, features):
        features["sentence_embedding"] = features["token_embeddings"].mean(1)
        return features

    def save(self, *args, **kwargs):
        pass


class OwnPooling(modules.Pooling):
    """A class of the user's, whatever it changes."""


READERS = {
    "a module of the user's": lambda: [Everything()],
    "a subclass of the user's": lambda: [OwnPooling(16)],
    "CNN": lambda: [modules.CNN(16, 8, [3]), modules.Pooling(8)],
}


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert", "mpnet", "nomic_bert"])
@pytest.mark.parametrize("reader", READERS)
def test_what_may_read_padding_gets_it(folder, family, reader, caplog):
    inner = modules.Transformer(folder(family))
    stock = SentenceTransformer(modules=[inner, *READERS[reader]()], device="cpu")
    transformers.utils.logging.enable_propagation()
    ours = as_way(stock, "accelerate")
    transformers.utils.logging.disable_propagation()
    (line,) = [r.getMessage() for r in caplog.records if "padding is computed" in r.getMessage()]
    assert "`1` is a" in line
    same(embedded(ours), embedded(stock))
    same(embedded(fastplm.freeze(ours)), embedded(stock))
    same(embedded(as_way(stock, "name")), embedded(stock))
    restored = fastplm.restore(ours)
    assert not any("_fastplm_padding_is_read" in vars(one) for one in restored.modules())
