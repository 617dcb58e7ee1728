"""What the tests of frozen models share: small models, batches, and their budget of error."""

from __future__ import annotations

import copy

import torch
import transformers

import fastplm
from fastplm import models
from fastplm.testing import (
    FORWARD_FACTOR,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    rerounded,
)

BERT = dict(
    vocab_size=50, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
    intermediate_size=70, max_position_embeddings=300, pad_token_id=1, initializer_range=0.3,
)  # fmt: skip
GPT2 = dict(
    vocab_size=60, n_embd=48, n_layer=3, n_head=4, n_positions=300, initializer_range=0.2,
    bos_token_id=1, eos_token_id=1,
)  # fmt: skip
T5 = dict(
    vocab_size=60, d_model=48, d_kv=10, num_heads=4, d_ff=70, num_layers=3,
    initializer_factor=2.0, decoder_start_token_id=0,
)  # fmt: skip
FAMILIES = {
    "bert": (models.BertModel, transformers.BertConfig, BERT),
    "roberta": (models.RobertaModel, transformers.RobertaConfig, BERT),
    "electra": (models.ElectraModel, transformers.ElectraConfig, BERT),
    "gpt2": (models.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "t5": (models.T5ForConditionalGeneration, transformers.T5Config, T5),
}
ENCODERS = ("bert", "roberta", "electra")


def made(family="bert", head=None, freeze=True, **changed):
    """A frozen drop-in model and its parent, with the same weights, biases and all."""
    kind, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = (head or kind)(config(**{**sizes, **changed})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return fastplm.freeze(model) if freeze else model, parent_of(model)


def parent_of(model):
    """A copy with Transformers' classes."""
    return fastplm.restore(copy.deepcopy(model))


def batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 50, mask.shape, generator=generator).masked_fill(~mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


def tokens(out, given):
    """The states of tokens and, of a model with a pooler, its output: [rows, E]."""
    seen = given.get("attention_mask")
    seen = torch.ones(out[0].shape[:2]) if seen is None else seen
    return torch.cat([out[0][seen.expand(out[0].shape[:2]).bool()], *out[1:]])


def prompt(padding=(0, 3, 0), length=7):
    """Ids and a mask, whose padding is at the left."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    ids = torch.randint(2, 60, mask.shape, generator=generator).masked_fill(~mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long()}


def steps(model, given, count=3, seed=2):
    """The logits of ``count`` tokens after the prompt, [B, count, V], and the cache."""
    generator, size = torch.Generator().manual_seed(seed), given["input_ids"].shape[0]
    drawn = torch.randint(2, 60, (size, count), generator=generator)
    logits, mask = [], given["attention_mask"]
    first = {"decoder_input_ids": drawn[:, :1]} if model.config.is_encoder_decoder else {}
    out = model(**given, **first, use_cache=True)
    for i in range(count):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        out = step(model, given, drawn[:, i : i + 1], out.past_key_values, mask)
        logits.append(out.logits)
    return torch.cat(logits, 1), out.past_key_values


def step(model, given, token, cache, mask):
    if not model.config.is_encoder_decoder:
        places = (mask.cumsum(1) - 1)[:, -1:]
        return model(token, attention_mask=mask, past_key_values=cache, position_ids=places)
    states = (torch.zeros(*given["input_ids"].shape, model.config.d_model),)  # it is in the cache
    return model(
        attention_mask=given["attention_mask"],
        decoder_input_ids=token,
        encoder_outputs=states,
        past_key_values=cache,
    )


def hold(name, out, parent, run, factor=FORWARD_FACTOR):
    """The error of ``out`` is within that of ``run(parent)``; the parent is fp64 afterwards."""
    measures = [run(parent)]
    for mode in (ReversedReductions(), ShuffledReductions(0)):
        with mode:
            measures.append(run(parent))
    measures += [run(other) for other in rerounded(parent)]
    check_error(name, out, run(parent.double()), measures, factor)
