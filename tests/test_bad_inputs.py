"""What a wrong call is told: the argument, what it got, what was expected, and what to do."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import fastplm
from fastplm import ops

NAN, INF = math.nan, math.inf
HUGE = 2**63
LONG, INT, HALF = torch.int64, torch.int32, torch.float16


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*values, dtype=LONG):
    return torch.tensor(values, dtype=dtype)


BIAS = ops.T5RelativeBias(zeros(32, 2))
CU = ids(0, 2, 5, dtype=INT)
TOKENS = torch.arange(5, 17).view(2, 6)
ROWS = zeros(4, 8)
SEEDS = (1.5, "1", True, HUGE, -HUGE - 1, ids(1), torch.tensor(1.0))
BAD_SHARES = (-0.1, 1.1, NAN, INF, "0.1", None)

#: Each op: a call without error, and for its arguments values that are wrong.
OPS = {
    "attention": (
        dict(query=zeros(2, 2, 3, 8), key=zeros(2, 2, 4, 8), value=zeros(2, 2, 4, 8)),
        {
            "query": (None, [1.0], zeros(2, 3, 8), zeros(2, 2, 3, 8, dtype=LONG)),
            "key": (
                *(zeros(2, 2, 4), zeros(1, 2, 4, 8), zeros(2, 1, 4, 8), zeros(2, 2, 4, 16)),
                zeros(2, 2, 4, 8, dtype=HALF),
            ),
            "value": (zeros(2, 2, 5, 8), zeros(2, 2, 4, 8, dtype=torch.float64)),
            "key_mask": (
                *("mask", zeros(2, 4), zeros(2, 3, dtype=torch.bool)),
                *(zeros(4, dtype=torch.bool), zeros(2, 4, dtype=LONG)),
            ),
            "dropout_p": BAD_SHARES,
            "scale": ("x", NAN),
            "seed": SEEDS,
            "relative_bias": (zeros(32, 2), BIAS._replace(weight=zeros(32, 3))),
        },
    ),
    "attention_varlen": (
        dict(
            **dict(query=zeros(5, 2, 8), key=zeros(5, 2, 8), value=zeros(5, 2, 8)),
            **dict(cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=3, max_seqlen_k=3),
        ),
        {
            "query": (zeros(1, 5, 2, 8),),
            "cu_seqlens_q": ([0, 5], CU.long(), ids(1, 2, 5, dtype=INT), ids(0, 9, 5, dtype=INT)),
            "cu_seqlens_k": (CU[:2], ids(0, 2, 6, dtype=INT), ids(0, 4, 3, dtype=INT)),
            "max_seqlen_q": (-1, 2, "3"),
            "max_seqlen_k": (0,),
            "key_mask": (zeros(2, 3, dtype=torch.bool), zeros(5)),
        },
    ),
    "linear_cross_entropy": (
        dict(input=ROWS, linear_weight=zeros(6, 8), target=ids(0, 1, -100, 5)),
        {
            "input": (None, zeros(1, 4, 8), ROWS.long()),
            "linear_weight": (zeros(6, 7), zeros(6), zeros(6, 8, dtype=HALF)),
            "linear_bias": (zeros(5), zeros(6, 1), 1.0),
            "target": (ids(0, 1), ids(0, 1, 2, 6), ids(0, 1, 2, -1), ROWS[:, 0], [0, 1, 2, 3]),
            "reduction": ("average", None),
            "label_smoothing": BAD_SHARES,
            "normalizer": (2.0, ids(1, 2)),
            "logits_budget": (-1, "1 GB"),
            "expected_targets": (-1,),
        },
    ),
    "linear_cross_entropy_with_sample": (
        dict(input=ROWS, linear_weight=zeros(6, 8), target=ids(0, 1, -100, 5), seed=0),
        {
            "seed": (*SEEDS[:1], *SEEDS[3:]),
            "temperature": (0.0, -1.0, NAN, INF, "1"),
            "sample_index": (ids(0), zeros(4), 1),
            "position": (ids(0, 1, 2),),
        },
    ),
    "replaced_token_loss": (
        dict(input=ROWS, weight=zeros(8), replaced=zeros(4, dtype=torch.bool)),
        {
            "input": (zeros(4), ROWS.int()),
            "weight": (zeros(7), zeros(1, 8), zeros(8, dtype=HALF)),
            "replaced": (zeros(4), zeros(3, dtype=torch.bool), (ids(1), ids(1)), (1, 2, 3)),
            "bias": (zeros(2), 0.5),
            "mask": (zeros(4), zeros(5, dtype=torch.bool)),
            "reduction": ("batchmean",),
        },
    ),
    "gather_rows": (
        dict(input=ROWS, positions=ids(0, -1)),
        {
            "input": (zeros(2, 2, 2), ROWS.long(), zeros(4, 0)),
            "positions": (ids(4), ids(-2), ids(0, dtype=INT), zeros(1, 1, dtype=LONG), [0]),
        },
    ),
    "linear": (
        dict(input=ROWS, weight=zeros(6, 8)),
        {
            "input": (zeros(4, 7), torch.tensor(1.0), ROWS.long(), None),
            "weight": (zeros(8), zeros(6, 8, dtype=torch.float64), zeros(6, 8, dtype=HALF)),
            "bias": (zeros(5), zeros(6, dtype=HALF)),
        },
    ),
    "rms_norm": (
        dict(input=ROWS, weight=zeros(8)),
        {"weight": (zeros(7), zeros(8, dtype=LONG)), "eps": (-1e-6, NAN, "1e-6", None)},
    ),
    "gelu": (dict(input=ROWS), {"input": (1.0, ROWS.int()), "approximate": ("exact", None)}),
    "dropout": (dict(input=ROWS, p=0.1), {"p": BAD_SHARES, "seed": SEEDS, "input": (ROWS.int(),)}),
    "mask_tokens": (
        dict(input_ids=TOKENS, vocab_size=20, mask_token_id=4, seed=0),
        {
            "input_ids": (TOKENS[0], TOKENS.float()),
            "vocab_size": (0, 20.0, None),
            "mask_token_id": (-1, 20, None),
            "mlm_probability": (0, *BAD_SHARES),
            "mask_replace_prob": BAD_SHARES,
            "random_replace_prob": (0.5, "0.1"),
            "special_ids": (ids(3, 2), ids(25), ids(-1), [0, 1]),
            "maskable": (TOKENS, zeros(2, 5, dtype=torch.bool)),
            "max_predictions": (0, 1.5),
            "sampling": ("all",),
            "unit": ("sentence",),
            "word_ids": (TOKENS,),
            "seed": SEEDS,
            "step": (-1, 2**28, 0.5),
        },
    ),
    "corrupt_spans": (
        dict(input_ids=TOKENS, sentinel_ids=ids(99, 98), seed=0),
        {
            "sentinel_ids": (ids(), ids(-1, 5), zeros(2), 99),
            "noise_density": (0.0, 1.0, NAN, "0.15", None),
            "mean_span_length": (0.5, NAN, "3"),
            "eos_token_id": (-1, 1.0),
            "pad_token_id": (-1, None),
            "lengths": (ids(1), ids(7, 6), ids(-1, 2)),
            "seed": SEEDS,
        },
    ),
    "bart_noise": (
        dict(input_ids=TOKENS, vocab_size=20, mask_token_id=4, pad_token_id=1, seed=0),
        {
            "infill_probability": BAD_SHARES,
            "poisson_lambda": (0.0, 21.0, NAN, "3"),
            "delete_probability": (1.1,),
            "sentence_end_ids": (ids(2, 2), 5),
            "capacity": (-1,),
            "max_seqlen": (6,),
            "seed": SEEDS,
        },
    ),
}
CALLS = [
    pytest.param(op, argument, value, id=f"{op}-{argument}-{place}")
    for op, (_, arguments) in OPS.items()
    for argument, values in arguments.items()
    for place, value in enumerate(values)
]


@pytest.mark.parametrize("op", OPS)
def test_the_call_is_right_but_for_that(op):
    given, _ = OPS[op]
    getattr(ops, op)(**given)


@pytest.mark.parametrize("op, argument, value", CALLS)
def test_ops_name_the_argument(op, argument, value):
    given, _ = OPS[op]
    if op == "attention" and argument == "seed":
        given = dict(given, dropout_p=0.1)
    with pytest.raises(fastplm.FastplmError) as caught:
        getattr(ops, op)(**dict(given, **{argument: value}))
    said = str(caught.value)
    assert f"`{argument}" in said and "expected" in said and said.startswith(op)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_two_hundred_of_them():
    assert len(CALLS) + len(MODEL_CALLS) >= 200


# --- models ---------------------------------------------------------------------------------------

IDS = torch.arange(4, 16).view(2, 6)
TOO_LONG = torch.full((1, 21), 5)


@functools.cache
def model(name):
    from fastplm import models

    sizes = dict(vocab_size=30, pad_token_id=0)
    encoder = dict(
        **dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16),
        **dict(max_position_embeddings=20, num_labels=3),
    )
    bart = dict(
        **dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16),
        **dict(decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2),
        **dict(max_position_embeddings=20),
    )
    gpt = dict(n_embd=16, n_layer=1, n_head=2, n_positions=20)
    t5 = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    of_family = {
        **dict.fromkeys(("Bert", "Roberta", "Electra"), encoder),
        "Albert": {**encoder, "embedding_size": 16},
        **{"Bart": bart, "GPT2": gpt, "OpenAIGPT": gpt, "T5": t5},
    }
    family = next(prefix for prefix in of_family if name.startswith(prefix))
    kind = getattr(models, name)
    return kind(kind.config_class(**sizes, **of_family[family])).eval()


ENCODERS = ("BertModel", "RobertaModel", "AlbertModel", "ElectraModel")
BACKBONES = (*ENCODERS, "GPT2Model", "OpenAIGPTModel", "BartModel", "T5Model", "T5EncoderModel")
POSITIONS = ("BertModel", "RobertaModel", "AlbertModel", "ElectraModel", "GPT2Model")
LABELLED = ("BertForMaskedLM", "BertForTokenClassification", "T5ForTokenClassification")


def decoded(name, **given):
    if name in ("BartModel", "T5Model") or "Conditional" in name:
        given.setdefault("decoder_input_ids", IDS)
    return given


#: (class, what it is given, the argument that its message names).
MODEL_CALLS = [
    *((name, dict(input_ids=TOO_LONG), "input_ids") for name in (*POSITIONS, "OpenAIGPTModel")),
    ("BartModel", dict(input_ids=TOO_LONG), "input_ids"),
    ("BartModel", dict(input_ids=IDS, decoder_input_ids=TOO_LONG.expand(2, -1)), "input_ids"),
    ("BertModel", dict(inputs_embeds=zeros(1, 21, 16)), "input_ids"),
    ("BertForMaskedLM", dict(input_ids=TOO_LONG, labels=TOO_LONG), "input_ids"),
    *((name, dict(input_ids=IDS, attention_mask=zeros(6)), "attention_mask") for name in BACKBONES),
    *(
        (name, dict(input_ids=IDS, attention_mask=[[1] * 6] * 2), "attention_mask")
        for name in BACKBONES
    ),
    *(
        (name, dict(input_ids=IDS, attention_mask=zeros(2, 5, dtype=LONG)), "attention_mask")
        for name in BACKBONES
    ),
    *((name, dict(input_ids=IDS + 20), "input_ids") for name in BACKBONES),
    *((name, dict(input_ids=IDS - 5), "input_ids") for name in BACKBONES),
    *((name, dict(input_ids=IDS.float()), "input_ids") for name in BACKBONES),
    *((name, dict(input_ids=IDS.tolist()), "input_ids") for name in BACKBONES),
    *((name, dict(input_ids=IDS[0]), "input_ids") for name in ENCODERS),
    *((name, dict(input_ids=IDS, labels=IDS[:, :5]), "labels") for name in LABELLED),
    *((name, dict(input_ids=IDS, labels=IDS.tolist()), "labels") for name in LABELLED[:1]),
    ("BertForMaskedLM", dict(input_ids=IDS, labels=IDS.float()), "labels"),
    ("GPT2LMHeadModel", dict(input_ids=IDS, labels=IDS[:, :5]), "labels"),
    ("GPT2LMHeadModel", dict(input_ids=IDS, labels=IDS.tolist()), "labels"),
    ("T5ForConditionalGeneration", dict(input_ids=IDS, labels=IDS[:, :5]), "labels"),
    ("BartForConditionalGeneration", dict(input_ids=IDS, labels=IDS.float()), "labels"),
    ("ElectraForPreTraining", dict(input_ids=IDS, labels=IDS[:, :5]), "labels"),
    (
        "BertForMaskedLM",
        dict(input_ids=IDS, labels=IDS, masked_positions=ids(12)),
        "masked_positions",
    ),
    (
        "BertForMaskedLM",
        dict(input_ids=IDS, labels=IDS, masked_positions=[1]),
        "masked_positions",
    ),
    (
        "BertForPreTraining",
        dict(input_ids=IDS, next_sentence_label=ids(0, 1, 1)),
        "next_sentence_label",
    ),
    ("BertModel", dict(input_ids=IDS, attention_mask=(IDS > 6).long(), unpad=3), "unpad"),
]


@pytest.mark.parametrize(
    "name, given, argument",
    [
        pytest.param(name, given, argument, id=f"{name}-{argument}-{place}")
        for place, (name, given, argument) in enumerate(MODEL_CALLS)
    ],
)
def test_models_name_the_argument(name, given, argument):
    if argument == "attention_mask" and isinstance(given[argument], torch.Tensor):
        given = dict(given, attention_mask=torch.ones_like(given[argument]))
    with pytest.raises(fastplm.FastplmError) as caught:
        model(name)(**decoded(name, **given))
    said = str(caught.value)
    assert f"`{argument}`" in said and "expected" in said


@pytest.mark.parametrize("name", [*POSITIONS, "OpenAIGPTModel", "BartModel"])
def test_the_most_tokens_there_are_positions_for(name):
    """One token more is too many, and no value is looked at to know it."""
    most = 19 if name == "RobertaModel" else 20
    model(name)(**(decoded(name, input_ids=torch.full((2, most), 5))))
    with pytest.raises(ValueError, match=rf"at most {most}, .*max_position_embeddings"):
        model(name)(**decoded(name, input_ids=torch.full((2, most + 1), 5)))


def test_padding_takes_none_of_robertas_positions():
    text = torch.full((1, 30), 0)
    text[0, :19] = 5
    model("RobertaModel")(input_ids=text, attention_mask=(text != 0).long())


def test_a_cache_counts():
    gpt2 = model("GPT2Model")
    cache = gpt2(torch.full((1, 20), 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="1 tokens after 20 in the cache"):
        gpt2(torch.full((1, 1), 5), past_key_values=cache)
