"""Training steps of all families on a CUDA device that does not exist (``tools/step_model.py``).

Run by ``test_on_cuda.py``; it prints a line of JSON for each model and batch.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import step_model

if __name__ == "__main__" and (status := step_model.run_preloaded()) is not None:
    raise SystemExit(status)

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastplm import models
from fastplm.models import ELECTRA_OBJECTIVES, _ragged
from fastplm.nn import _rows
from fastplm.ops._attention_call import BITS

BATCH, SEQLEN, LAYERS, WIDTH, VOCAB = 8, 32, 2, 64, 101
TOTAL, TOKENS, LABELS, REACHED, CAPACITY = 256, 170, 40, 150, 200
DROPS = dict(attention_probs_dropout_prob=0.1, attention_dropout=0.1)
SMALL = dict(vocab_size=VOCAB, num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=2)
ENCODER = dict(**SMALL, **DROPS, intermediate_size=2 * WIDTH, embedding_size=WIDTH)
GPT = dict(vocab_size=VOCAB, n_positions=SEQLEN, n_embd=WIDTH, n_layer=LAYERS, n_head=2)
BART = dict(vocab_size=VOCAB, d_model=WIDTH, max_position_embeddings=64, attention_dropout=0.1)
for side in ("encoder", "decoder"):
    sizes = dict(layers=LAYERS, attention_heads=2, ffn_dim=2 * WIDTH)
    BART |= {f"{side}_{name}": size for name, size in sizes.items()}
T5 = dict(vocab_size=VOCAB, d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=2)
T5 |= dict(decoder_start_token_id=0)
#: The configuration of each model, by the name of its class.
CONFIGS = {
    **{
        f"{family}For{head}": lambda family=family: of(family, ENCODER)
        for family in ("Bert", "Roberta", "Albert", "Electra")
        for head in ("MaskedLM", "SequenceClassification", "TokenClassification", "PreTraining")
        if hasattr(models, f"{family}For{head}")
    },
    **{
        f"{family}{head}": lambda family=family: of(family, GPT)
        for family in ("GPT2", "OpenAIGPT")
        for head in ("LMHeadModel", "DoubleHeadsModel")
    },
    "BertLMHeadModel": lambda: of("Bert", ENCODER | dict(is_decoder=True)),
    "BartForConditionalGeneration": lambda: of("Bart", BART),
    "T5ForConditionalGeneration": lambda: of("T5", T5),
    **{
        f"ElectraForJointPreTraining {objective}": lambda objective=objective: (
            models.ElectraJointConfig.from_discriminator(
                of("Electra", ENCODER), generator_size=0.5, objective=objective
            )
        )
        for objective in ELECTRA_OBJECTIVES
    },
}
#: What is read of a batch: labels; then the tokens of each mask, and its rows that are computed
#: although they are masked.
BATCHES = {
    "padded": (LABELS, TOKENS, 0, REACHED, 0),
    "full": (LABELS, TOTAL, 0, TOTAL, 0),
    "labels on padding": (LABELS, TOKENS, 3, REACHED, 3),
    "capacity": (),
    "positions": (),
}


def of(family, sizes):
    return getattr(transformers, f"{family}Config")(**sizes)


class Count(TorchDispatchMode):
    """Counts operators, key masks by what their bits are kept in, and operators that read or write
    a table of all words."""

    def __init__(self):
        super().__init__()
        self.names, self.masks, self.rows = collections.Counter(), set(), []
        self.tables = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name.split("::")[1]
        self.names[name] += 1
        if name.startswith("attention_"):
            call = args[name.endswith("bwd") :]
            self.rows.append(call[0].numel() // WIDTH)
            if call[3] is not None:
                self.masks.add(id(getattr(call[3], BITS, call[3])))
                self.names["masked attention"] += 1
        out = op(*args, **(kwargs or {}))
        if name not in step_model.NO_KERNEL:
            both = tree_leaves((args, kwargs, out))
            self.tables[name] += any(getattr(one, "shape", ())[:1] == (VOCAB,) for one in both)
        return out


def step(name, batch):
    """(the operators of a step, how many numbers the host has read at each wait)."""
    kind, numbers, reads = name.split()[0], list(BATCHES[batch]), []
    if not ("LM" in kind or "PreTraining" in kind or "Double" in kind or "Gen" in kind):
        numbers = numbers[1:]  # their labels are not counted
    if kind == "ElectraForPreTraining":
        numbers = numbers[1:]

    def read(*given):
        reads.append(len(given))
        return numbers[: len(given)] if len(reads) == 1 else [TOKENS, 3][: len(given)]

    with step_model.fake_device(as_real=True) as mode, mode:
        with torch.device("cuda"):
            model = getattr(models, kind)._from_config(CONFIGS[name]()).train()
            shape = (BATCH, 2, SEQLEN // 2) if "Double" in name else (BATCH, SEQLEN)
            ids, mask = torch.zeros(2, *shape, dtype=torch.int64)
            labels = ids[:, 0].clone() if "Sequence" in kind else ids.clone()
            positions = torch.zeros(LABELS, dtype=torch.int64)
        inputs = dict(input_ids=ids, attention_mask=mask, labels=labels)
        if batch in ("capacity", "positions"):
            inputs |= dict(unpad=CAPACITY)
            if "Generation" in kind:
                inputs |= dict(decoder_unpad=CAPACITY)
        if batch == "positions":
            inputs |= dict(masked_positions=positions)
        with mock.patch.object(_ragged, "read", read), mock.patch.object(_rows, "read", read):
            with Count() as count, torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**inputs).loss
                loss.backward()
    return count, reads


def cases():
    """Each model and batch."""
    for name in CONFIGS:
        for batch in BATCHES:
            predicts = "MaskedLM" in name or "Joint" in name
            if batch == "positions" and not predicts:
                continue
            if batch != "labels on padding" or predicts or "LMHead" in name:
                yield name, batch


if __name__ == "__main__":
    for name, batch in cases():
        count, reads = step(name, batch)
        found = dict(names=count.names, reads=reads, masks=len(count.masks), rows=count.rows)
        found |= dict(tables=+count.tables)
        print(json.dumps([name, batch, found]))
