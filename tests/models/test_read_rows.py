"""Rows that somebody may read although the mask hides them, and the gradients of hidden states."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import fastplm
from fastplm import models
from fastplm._backends import record_notes
from fastplm.hf import attention_of

from .conftest import (
    CLASSES,
    CLONED,
    PADDINGS,
    as_loss,
    config_of,
    eager_parent,
    has_decoder,
    inputs_of,
    pair,
    parent_of,
)

EVERY = CLASSES | CLONED
#: 1 = seen, 0 = padding, 2 = a token that the mask hides: behind a text, before it, within it.
PLACES = {
    "behind": [[1] * 9, [1] * 4 + [2] * 3 + [0] * 2, [1] * 7 + [2] * 2, [1] * 2 + [2] * 7],
    "before": [[1] * 9, [2] * 3 + [1] * 4 + [0] * 2, [2] * 2 + [1] * 7, [2, 1] * 4 + [0]],
    "within": [[1] * 9, [1, 2, 2, 1, 2, 1, 1, 0, 0], [1, 2] * 4 + [0], [1, 1, 2] * 2 + [1, 0, 0]],
}
#: Classes with an output for each token, those without labels.
FOR_TOKENS = [
    name
    for name in EVERY
    if not name.endswith(("SequenceClassification", "MultipleChoice", "DoubleHeadsModel"))
    and not name.endswith("NextSentencePrediction")
]


def is_causal(name):
    return name.endswith(("CausalLM", "LMHeadModel")) or name.startswith(("GPT2", "OpenAIGPT"))


def config_for(name):
    # A token whose window holds no other has no defined output.
    return config_of(name, **({"local_attention": 40} if name.startswith("ModernBert") else {}))


def filled(name, config, places):
    """A batch whose mask hides tokens, and where its rows have defined outputs."""
    places = torch.tensor(places)
    given = inputs_of(name, config, (places == 1).long())
    ids = torch.randint(6, 30, places.shape)
    given["input_ids"] = torch.where(places == 0, config.pad_token_id or 0, ids)
    return given, places > 0


def for_tokens(outputs, name, read):
    """The outputs of tokens that are read."""
    if has_decoder(name):
        outputs = {key: one for key, one in outputs.items() if key == "encoder_last_hidden_state"}
    found = {
        key: one[read]
        for key, one in outputs.items()
        if isinstance(one, torch.Tensor) and one.shape[:2] == read.shape
    }
    assert found
    return found


@pytest.mark.parametrize("labels", [False, True], ids=["", "with labels"])
@pytest.mark.parametrize("name", FOR_TOKENS)
def test_what_the_mask_hides_is_computed_as_in_the_parent(name, labels):
    model, parent = pair(name, config_for(name))
    for where in ("behind",) if is_causal(name) else PLACES:
        given, read = filled(name, model.config, PLACES[where])
        if not labels and not name.endswith("ConditionalGeneration"):  # T5 has no others
            others = ("labels", "start_positions", "end_positions")
            others += ("next_sentence_label", "sentence_order_label")
            given = {key: one for key, one in given.items() if key not in others}
        with torch.no_grad():
            ours, theirs = model(**given), parent(**given)
        theirs = for_tokens(theirs, name, read)
        for key, one in for_tokens(ours, name, read).items():
            torch.testing.assert_close(one, theirs[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["class", "accelerate", "name"])
@pytest.mark.parametrize("name", [name for name in EVERY if name.endswith("Model")])
def test_however_the_model_is_made(name, way):
    if name.endswith(("DoubleHeadsModel", "LMHeadModel")):
        pytest.skip("tested above")
    model, parent = pair(name, config_for(name))
    if way == "accelerate":
        model = fastplm.accelerate(copy.deepcopy(parent))
    elif way == "name":
        kind, options = parent_of(type(model)), {"attn_implementation": "fastplm"}
        if attention_of(kind) != "interface":
            pytest.skip("its attention has no name")
        model = kind._from_config(parent.config, **options)
        model.eval().load_state_dict(parent.state_dict())
    given, read = filled(name, parent.config, PLACES["behind"])
    with torch.no_grad(), record_notes() as notes:
        ours = for_tokens(model(**given), name, read)
    with torch.no_grad():
        theirs = for_tokens(parent(**given), name, read)
    for key, one in ours.items():
        torch.testing.assert_close(one, theirs[key], rtol=1e-4, atol=1e-4)
    if way != "name":  # two rows of the second text are padding, to which DeBERTa's tokens attend
        kept = name.startswith("DebertaV2")
        expected = "36 rows with their padding" if kept else "34 of 36 rows, padding left out"
        assert expected in "\n".join(notes)


class Mean(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.dense = nn.Linear(*sizes)

    def forward(self, hidden):
        return self.dense(hidden.mean(1))


@pytest.mark.parametrize("name", EVERY)
def test_a_pooler_and_a_head_of_the_users_read_all_rows(name):
    """Put in after the class was made; heads of Transformers' that read all rows of a text."""
    model, parent = pair(name, config_for(name))
    owner, theirs, where = model.base_model, parent.base_model, "pooler"
    if not isinstance(getattr(theirs, where, None), nn.Module):
        owner, theirs, where = model, parent, "classifier"
    if not type(getattr(theirs, where, None)).__name__.endswith(("Pooler", "ClassificationHead")):
        pytest.skip("it has none that gets all rows")
    own = Mean((16, 16 if where == "pooler" else model.config.num_labels))
    setattr(owner, where, own)
    setattr(theirs, where, copy.deepcopy(own))
    given = inputs_of(name, model.config, PADDINGS["right"])
    with torch.no_grad():
        ours, theirs = model(**given), parent(**given)
    read = [key for key in ("pooler_output", "logits", "seq_relationship_logits") if key in theirs]
    for key in [key for key in read if theirs[key].dim() == 2]:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-4)


def test_what_shows_no_ids_is_computed():
    """Of embeddings, and where the configuration names no padding; ``unpad=True`` says that nobody
    reads what the mask hides."""
    mask = PADDINGS["right"]
    model, parent = pair("BertModel")
    embeds = torch.randn(*mask.shape, 16)
    with torch.no_grad():
        theirs = parent(inputs_embeds=embeds, attention_mask=mask)[0]
        torch.testing.assert_close(
            model(inputs_embeds=embeds, attention_mask=mask)[0], theirs, rtol=1e-4, atol=1e-4
        )
        left_out = model(inputs_embeds=embeds, attention_mask=mask, unpad=True)[0]
    assert not left_out[:, 1:][mask[:, 1:] == 0].any()
    nameless, parent = pair("OpenAIGPTModel", pad_token_id=None, eos_token_id=None)
    ids = torch.randint(0, 30, mask.shape)
    with torch.no_grad():
        ours, theirs = (each(ids, attention_mask=mask)[0] for each in (nameless, parent))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# --- modules of the user --------------------------------------------------------------------------


class Beside(nn.Module):
    """A norm of the user's that reads all values of a row."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return out + out.mean(-2, keepdim=True)


def beside(module):
    """The user's own in place of a module: one that reads all values of a row."""
    if hasattr(module, "weight"):
        return Beside(module)
    forward = type(module).forward

    def reads_beside(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        return out + out.mean(-2, keepdim=True)

    module.__class__ = type("Own", (type(module),), {"forward": reads_beside})
    return module


@pytest.mark.parametrize("name", [one for one in EVERY if re.search("(?<!Heads|MHead)Model", one)])
def test_a_module_of_the_user_beside_the_layers_may_read_padding(name):
    config = config_for(name)
    part = "encoder" if has_decoder(name) else ""

    def replaced(model, path):
        module = model.get_submodule(part)
        setattr(module, path, beside(module.get_submodule(path)))
        return model.eval()

    stack = getattr(models, name)(copy.deepcopy(config)).get_submodule(part)
    others = {"encoder", "layers", "layer", "h", "block", "transformer"}  # which have their tests
    others |= {"wte", "embed_tokens", "rotary_emb", "rotary_embeddings"}
    for path in dict(stack.named_children()).keys() - others:
        model = getattr(models, name)(copy.deepcopy(config))
        parent = eager_parent(type(model), config)
        parent.load_state_dict(model.state_dict())
        given = inputs_of(name, config, PADDINGS["right"])
        with torch.no_grad():
            ours, theirs = (replaced(one, path)(**given)[0] for one in (model, parent))
        seen = ... if part else given["attention_mask"].bool()  # a decoder's are all tokens
        torch.testing.assert_close(ours[seen], theirs[seen], rtol=1e-4, atol=1e-4, msg=path)


# --- hidden states --------------------------------------------------------------------------------


def states_of(outputs):
    """The returned states by name."""
    found = {}
    for key, value in outputs.items():
        if key.endswith("hidden_states"):
            found |= {f"{key} {at}": one for at, one in enumerate(value)}
        elif key.endswith("hidden_state"):
            found[key] = value
    return found


def gradients_of(model, name, given):
    outputs = model(**given, output_hidden_states=True)
    states = states_of(outputs)
    tensors = [one for one in outputs.values() if isinstance(one, torch.Tensor)]
    loss = outputs["loss"] if "loss" in outputs else as_loss(*tensors)
    found = torch.autograd.grad(loss, [*states.values()], allow_unused=True)
    return {key: one for key, one in zip(states, found, strict=True)}


def compare_gradients(model, parent, name, given):
    ours, theirs = gradients_of(model, name, given), gradients_of(parent, name, given)
    assert ours.keys() == theirs.keys() and theirs
    for key, one in theirs.items():
        assert (one is None) == (ours[key] is None), key
        if one is not None:
            both = one, ours[key]
            if key.startswith("encoder") or not has_decoder(name):
                seen = given["attention_mask"].bool()
                both = [each[seen.view(each.shape[:-1])] for each in both]
            torch.testing.assert_close(both[1], both[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_hidden_states_have_the_gradients_of_the_parent(name):
    config = config_for(name)
    model = getattr(models, name)(copy.deepcopy(config)).double()
    parent = eager_parent(type(model), config, dtype=torch.float64)
    parent.load_state_dict(model.state_dict())
    given = inputs_of(name, config, PADDINGS["right"])
    compare_gradients(model, parent, name, given)
    if not name.startswith(("GPT2", "OpenAIGPT", "Bart", "T5")):
        model, parent = model.eval(), parent.eval()
        model.config.output_hidden_states = parent.config.output_hidden_states = True
        compare_gradients(model, parent, name, given)


@pytest.mark.parametrize("name", [name for name in EVERY if name.endswith("Model")])
def test_the_last_hidden_state_is_under_the_pooler(name):
    """Without further hidden states padding is left out, and the pooler reads what is returned."""
    model, _ = pair(name)
    if getattr(model, "pooler", None) is None:
        pytest.skip("it has none")
    given = inputs_of(name, model.config, PADDINGS["right"])
    with record_notes() as notes:
        outputs = model(**given)
    assert "padding left out" in "\n".join(notes)
    loss = outputs["pooler_output"].sum()
    (found,) = torch.autograd.grad(loss, outputs["last_hidden_state"])
    assert found[:, 0].any(-1).all() and not found[:, 1:].any()
