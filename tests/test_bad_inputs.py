"""The error of a wrong call names the argument, what it got, what was expected, and what to do."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch

import fastplm
from fastplm import ops
from fastplm._registry import OPS as OPS_OF

from .samples import each_sample

NAN, INF = math.nan, math.inf
HUGE = 2**63
LONG, INT, HALF = torch.int64, torch.int32, torch.float16


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*values, dtype=LONG):
    return torch.tensor(values, dtype=dtype)


def bias(buckets=32, heads=2, bidirectional=True, max_distance=128, **options):
    return ops.T5RelativeBias(zeros(buckets, heads, **options), bidirectional, max_distance)


def ends(*values):
    return ids(*values, dtype=INT)


TOKENS = torch.arange(5, 17).view(2, 6)
FLAT = torch.arange(5, 14)
ROWS = zeros(4, 8)
ANGLES = zeros(1, 5, 16)
NO_INT = (1.5, "1", None, True)
SEEDS = (*NO_INT, HUGE, -HUGE - 1, ids(1), torch.tensor(1.0), ids(0, dtype=INT)[0])
SHARES = (-0.1, 1.1, NAN, INF, "0.1", None)
ENDS = ([0, 9], ends(), ends(1, 9), ends(0, 10), ends(0, 7, 6, 9), ids(0, 4, 9))
OF_DROPOUT = {
    "dropout_p": SHARES,
    "scale": ("x", NAN),
    "seed": [seed for seed in SEEDS if seed is not None],
    "sample_index": ([0, 1], ids(0, 1, dtype=INT), ids(0, 1, 2), zeros(2, 1, dtype=LONG)),
    "window": (*(3, "ab", (1,), (1, 2, 3), (-1, 2), (1, -1)), *((1.5, 2), (True, 2), (0, HUGE))),
    "relative_bias": (
        *(object(), zeros(32, 2), ops.T5RelativeBias(None), ops.T5RelativeBias(zeros(32))),
        *(bias(heads=3), bias(dtype=LONG), bias(7), bias(2), bias(0, bidirectional=False)),
        *(bias(max_distance=8), bias(bidirectional=False, max_distance=16)),
    ),
}
DISENTANGLED = {name: zeros(2, 2, 4, 8) for name in ("query", "key", "value")}
DISENTANGLED |= dict(pos_key=zeros(16, 2, 8), pos_query=None, max_distance=20)
#: Rows, and what is added to them and normalised.
ADDED = dict(input=ROWS, residual=ROWS, weight=zeros(8), sample_index=zeros(4, dtype=LONG))
OF_ADDED = {
    "input": (torch.tensor(1.0), zeros(4, 0)),
    "residual": (zeros(4, 7), zeros(8), zeros(2, 2, 8)),
    "dropout_p": SHARES,
    "eps": (-1.0, NAN, "1e-6", None),
    "seed": [seed for seed in SEEDS if seed is not None],
    "sample_index": (zeros(4), zeros(5, dtype=LONG), [0]),
    "position": (zeros(4), zeros(5, dtype=LONG), 0),
    "return_sum": (None, "yes", 1),
}
#: Rows whose product with a table are logits.
LOGITS = dict(input=ROWS, linear_weight=zeros(6, 8), target=ids(0, 1, -100, 5))
OF_LOGITS = {
    "input": (zeros(4, 0),),
    "linear_weight": (zeros(0, 8),),
    "linear_bias": (zeros(5), zeros(6, dtype=HALF)),
    "target": (ids(0, 1, 2, 6), ids(0, 1, 2, -1)),
    "reduction": ("average", None),
    "normalizer": (2.0, 3, ids(1, 2), ids(1)),
    "logits_budget": (-1, "1 GB"),
    "expected_targets": (-1,),
}
OF_ROWS = {
    "sample_index": (ids(0, 1, 2), zeros(2)),
    "seed": SEEDS,
    "step": (-1, 2**28, *NO_INT[:3]),
}

#: For each op, a call without error, and wrong values for its arguments. Tensors of another kind,
#: dtype, device, number of dimensions or size than declared are tested below, by the declarations.
OPS = {
    "attention": (
        dict(query=zeros(2, 2, 3, 8), key=zeros(2, 2, 4, 8), value=zeros(2, 2, 4, 8)),
        {
            "key_mask": (zeros(2, 4), zeros(2, 3, dtype=torch.bool), zeros(2, 4, dtype=LONG)),
            "attn_mask": (
                *("mask", zeros(3, 4), zeros(2, 2, 3, 4, dtype=LONG)),
                *(
                    zeros(*shape, dtype=torch.bool)
                    for shape in ((4,), (2, 4), (2, 3, 4), (2, 2, 4, 3), (3, 2, 3, 4), (2, 3, 3, 4))
                ),
            ),
            **OF_DROPOUT,
        },
    ),
    "attention_varlen": (
        dict(
            **dict(query=zeros(5, 2, 8), key=zeros(5, 2, 8), value=zeros(5, 2, 8)),
            **dict(cu_seqlens_q=ends(0, 2, 5), cu_seqlens_k=ends(0, 2, 5)),
            **dict(max_seqlen_q=3, max_seqlen_k=3),
        ),
        {
            "cu_seqlens_q": (ends(), ends(1, 2, 5), ends(0, 9, 5), ends(-1, 2, 3)),
            "cu_seqlens_k": (ends(0, 2, 6), ends(0, 4, 3)),
            "max_seqlen_q": (-1, 2, "3"),
            "max_seqlen_k": (-1, 0),
            "key_mask": (zeros(2, 3, dtype=torch.bool), zeros(5), zeros(4, dtype=torch.bool)),
            **OF_DROPOUT,
        },
    ),
    "linear_cross_entropy": (LOGITS, OF_LOGITS | {"label_smoothing": SHARES}),
    "linear_cross_entropy_with_sample": (
        LOGITS | dict(seed=0),
        {
            "seed": SEEDS,
            "temperature": (0.0, -1.0, NAN, INF, 1e-40, 1e300),
            **dict.fromkeys(
                ("sample_index", "position"),
                (ids(0), zeros(4), 1, [0] * 4, zeros(4, 1, dtype=LONG), zeros(4, dtype=INT)),
            ),
        },
    ),
    "linear_distillation": (
        LOGITS | dict(teacher_input=zeros(4, 3), teacher_weight=zeros(6, 3)),
        {
            **OF_LOGITS,
            "teacher_bias": (zeros(5), zeros(6, dtype=HALF)),
            "temperature": (0.0, -1.0, NAN, INF, 1e-40, "2"),
            "divergence": ("kl", None),
            "beta": SHARES,
            **dict.fromkeys(("distillation_weight", "cross_entropy_weight"), (-1.0, NAN, INF, "1")),
            "mask": (zeros(4), zeros(5, dtype=torch.bool), zeros(4, 1, dtype=torch.bool), [True]),
        },
    ),
    "linear_distillation_topk": (
        dict(
            **dict(input=ROWS, linear_weight=zeros(6, 8)),
            **dict(teacher_indices=ids(0, 1, 2, 5)[:, None], teacher_probabilities=zeros(4, 1) + 1),
        ),
        {
            "teacher_indices": (
                ids(0, 1, 2, 6)[:, None],
                ids(0, 1, -1, 3)[:, None],
                zeros(4, 0, dtype=LONG),
            ),
            "renormalize": ("yes", None, 1),
        },
    ),
    "replaced_token_loss": (
        dict(input=ROWS, weight=zeros(8), replaced=zeros(4, dtype=torch.bool)),
        {
            "replaced": (
                zeros(3, dtype=torch.bool),
                (True,) * 4,
                (ids(1), ids(1)),
                (1, 2, 3),
                (TOKENS[0, :4],),
                (TOKENS[0, :4], None),
                (TOKENS[0, :4], TOKENS[:1, :4]),
                (TOKENS[0, :4], TOKENS[0, :4].int()),
                (TOKENS[0, :4], TOKENS[0, :3]),
                (TOKENS[0, :3], TOKENS[0, :4]),
                (TOKENS[0, :4] > 5,) * 2,
                (TOKENS[0, :4], TOKENS[0, :4].to("meta")),
            ),
            "bias": (zeros(2), zeros(1, dtype=torch.float64)),
            "mask": (zeros(4), zeros(5, dtype=torch.bool)),
            "reduction": ("batchmean",),
            "normalizer": (3.0, zeros(2)),
        },
    ),
    "gather_rows": (
        dict(input=ROWS, positions=ids(0, -1)),
        {
            "input": (zeros(4, 0),),
            "positions": (ids(4), ids(-2)),
        },
    ),
    "disentangled_attention": (
        DISENTANGLED,
        {
            "pos_key": (
                zeros(7, 2, 8),
                zeros(2, 2, 8),
                zeros(16, 3, 8),
                zeros(16, 2, 8, dtype=HALF),
            ),
            "pos_query": (zeros(14, 2, 8), zeros(16, 2, 7), zeros(16, 2, 8, dtype=HALF)),
            "max_distance": (-1, 5, 20.0, "20"),
            "key_mask": (zeros(2, 4), zeros(2, 3, dtype=torch.bool)),
            **{name: OF_DROPOUT[name] for name in ("dropout_p", "scale", "seed", "sample_index")},
        },
    ),
    "maxsim": (
        dict(
            **dict(query=zeros(5, 8), key=zeros(4, 8), max_seqlen_q=3, max_seqlen_k=4),
            **dict(cu_seqlens_q=ends(0, 2, 5), cu_seqlens_k=ends(0, 0, 4)),
        ),
        {
            "query": (zeros(5, 0),),
            "cu_seqlens_q": (*ENDS[:2], ids(0, 2, 5), ends(1, 2, 5), ends(0, 6, 5), ends(0, 2, 6)),
            "cu_seqlens_k": (ends(0, 2, 5), ends(0, 4, 3)),
            "max_seqlen_q": (-1, 2, "3"),
            "max_seqlen_k": (-1, 0),
        },
    ),
    "linear": (
        dict(input=ROWS, weight=zeros(6, 8)),
        {
            "input": (zeros(4, 7), torch.tensor(1.0)),
            "bias": (zeros(5), zeros(6, dtype=HALF)),
        },
    ),
    "linear_int8": (
        dict(input=ROWS, weight=zeros(1, 2, 16, 4, dtype=torch.uint8), scale=zeros(6)),
        {
            "input": (torch.tensor(1.0),),
            "weight": (
                zeros(1, 3, 16, 4, dtype=torch.uint8),
                zeros(2, 2, 16, 4, dtype=torch.uint8),
            ),
            "bias": (zeros(5), zeros(6, dtype=HALF)),
        },
    ),
    "rms_norm": (
        dict(input=ROWS, weight=zeros(8)),
        {
            "eps": (-1e-6, -1.0, NAN, "1e-6", None),
        },
    ),
    "gelu": (dict(input=ROWS), {"approximate": ("exact", None)}),
    "embedding_layer_norm": (
        dict(
            input_ids=ids(0, 1, 2),
            word_weight=zeros(5, 8),
            position_ids=ids(0, 1, 2),
            position_weight=zeros(4, 8),
            token_type_ids=ids(0, 0, 1),
            token_type_weight=zeros(2, 8),
            weight=zeros(8),
            bias=zeros(8),
            sample_index=ids(0, 1, 2),
        ),
        {
            "word_weight": (zeros(5, 0), zeros(0, 8)),
            "position_weight": (zeros(0, 8),),
            "token_type_weight": (zeros(0, 8),),
            "bias": (zeros(7),),
            "padding_idx": (-1, 1.0, "0"),
            "position_padding_idx": (-1, 1.0, "0"),
            "dropout_p": SHARES,
            "eps": (-1.0, NAN, "1e-6", None),
            "seed": [seed for seed in SEEDS if seed is not None],
            "sample_index": (zeros(3), ids(0, 1), [0]),
            "position": (zeros(3), ids(0, 1), 0),
            "dtype": (torch.int64, "bf16", 16),
        },
    ),
    "bias_gelu": (
        dict(input=ROWS, bias=zeros(8)),
        {
            "input": (zeros(4, 0), torch.tensor(1.0)),
            "bias": (zeros(7), zeros(1, 8)),
            "approximate": ("exact", None),
        },
    ),
    "geglu": (
        dict(input=ROWS),
        {"input": (zeros(4, 0), torch.tensor(1.0)), "activation": ("relu", None)},
    ),
    "rotary": (
        dict(query=zeros(1, 2, 5, 16), key=zeros(1, 2, 5, 16), cos=ANGLES, sin=ANGLES),
        {
            "query": (zeros(5, 16),),
            "key": (zeros(1, 2, 4, 16),),
            "cos": (zeros(5, 16), zeros(1, 5, 16).requires_grad_()),
            "sin": (zeros(1, 5, 8), zeros(1, 4, 16), zeros(1, 5, 16).requires_grad_()),
        },
    ),
    "dropout": (
        dict(input=ROWS, p=0.1, sample_index=zeros(len(ROWS), dtype=LONG)),
        {
            "p": SHARES,
            "seed": [seed for seed in SEEDS if seed is not None],
            "position": (zeros(len(ROWS)), zeros(len(ROWS) + 1, dtype=LONG), 0),
        },
    ),
    "dropout_add_layer_norm": (
        ADDED | dict(bias=zeros(8)),
        OF_ADDED
        | {
            "bias": (zeros(7),),
            "linear_bias": (zeros(7), zeros(8, dtype=INT)),
        },
    ),
    "dropout_add_rms_norm": (ADDED, OF_ADDED),
    "mask_tokens": (
        dict(input_ids=TOKENS, vocab_size=20, mask_token_id=4, seed=0),
        {
            **OF_ROWS,
            "vocab_size": (0, 20.0, None),
            "mask_token_id": (-1, 20, None),
            "mlm_probability": (0, 15, *SHARES),
            "mask_replace_prob": SHARES,
            "random_replace_prob": (0.5, "0.1"),
            "special_ids": (ids(3, 2), ids(25), ids(-1), torch.arange(20), ids(5, 2**32)),
            "maskable": (TOKENS, zeros(2, 6), zeros(2, 5, dtype=torch.bool)),
            "max_predictions": (0, 1.5),
            "sampling": ("all",),
            "unit": ("sentence",),
            "word_ids": (TOKENS,),
        },
    ),
    "corrupt_spans": (
        dict(input_ids=TOKENS, sentinel_ids=ids(99, 98), seed=0),
        {
            **OF_ROWS,
            "sentinel_ids": (ids(), ids(-1, 5), 99),
            "noise_density": (0.0, 1.0, NAN, "0.15", None),
            "mean_span_length": (0.5, NAN, "3"),
            "eos_token_id": (-1, 1.0),
            "pad_token_id": (-1, None),
            "lengths": (ids(1), ids(7, 6), ids(-1, 2), ends(3, 4)),
            "max_seqlen": (6,),
        },
    ),
    "bart_noise": (
        dict(input_ids=TOKENS, vocab_size=20, mask_token_id=4, pad_token_id=1, seed=0),
        {
            **OF_ROWS,
            **dict.fromkeys(("infill_probability", "permute_sentences"), SHARES),
            **dict.fromkeys(("rotate_probability", "random_replace_prob"), SHARES),
            "poisson_lambda": (0.0, 21.0, NAN, "3"),
            "delete_probability": (1.1,),
            "sentence_end_ids": (ids(2, 2), 5, zeros(2)),
            "special_ids": (ids(3, 2), ids(2, 2), ids(25)),
            "vocab_size": (0, 10.0),
            "mask_token_id": (None,),
            "pad_token_id": (-1, None),
            "bos_token_id": ("<s>", -1),
            "eos_token_id": (-1,),
            "lengths": (ids(0, 1, 2), ids(3, 7), ids(-1, 6), zeros(2)),
            "capacity": (-1,),
            "max_seqlen": (6,),
        },
    ),
}
PACKED = {
    op: dict(given, input_ids=FLAT, cu_seqlens=ends(0, 4, 9), **longest)
    for op, longest in (
        ("mask_tokens", {}),
        ("corrupt_spans", {"max_seqlen": 5}),
        ("bart_noise", {"max_seqlen": 5}),
    )
    for given in [OPS[op][0]]
}
#: Arguments that are wrong together with others, and the beginning of the message.
TOGETHER = [
    (
        "attention",
        dict(zip(("query", "key", "value"), [zeros(2, 2, 3, 0)] * 3, strict=True)),
        "`query` got head",
    ),
    (
        "linear_cross_entropy",
        dict(normalizer=ids(3)[0], reduction="sum"),
        "`normalizer` got a tens",
    ),
    ("linear_distillation", dict(target=None, cross_entropy_weight=0.5), "`target` got None with"),
    ("linear_distillation", dict(normalizer=ids(3)[0], reduction="sum"), "`normalizer` got a tens"),
    ("replaced_token_loss", dict(normalizer=ids(3)[0], reduction="sum"), "`normalizer` got a tens"),
    *(
        (op, dict(sample_index=None, position=ids(0, 1, 2, 3)), "`position` got a value without")
        for op in ("dropout", "dropout_add_layer_norm", "dropout_add_rms_norm")
    ),
    ("replaced_token_loss", dict(input=zeros(4, 0), weight=zeros(0)), "`input` got shape (4, 0)"),
    ("mask_tokens", dict(mask_replace_prob=0.8, random_replace_prob=0.3), "`random_replace_prob`"),
    ("mask_tokens", dict(unit="word"), "`word_ids` got none; expected a tensor"),
    ("mask_tokens", dict(unit="word", word_ids=TOKENS.int()), "`word_ids` got torch.int32"),
    ("mask_tokens", dict(unit="ngram", word_ids=TOKENS, max_ngram=9), "`max_ngram` got 9"),
    ("mask_tokens", dict(cu_seqlens=ends(0, 9)), "`input_ids` got 2 dimensions"),
    ("bart_noise", dict(cu_seqlens=ends(0, 9), max_seqlen=5), "`input_ids` got 2 dimensions"),
    ("bart_noise", dict(eos_token_id=2, bos_token_id=3, capacity=1), "`capacity` got 1"),
    ("bart_noise", dict(mask_probability=0.6, delete_probability=0.5), "`delete_probability`"),
    *(
        (op, PACKED[op] | {"cu_seqlens": value}, "`cu_seqlens` got")
        for op in PACKED
        for value in ENDS
    ),
    *(
        (op, PACKED[op] | change, words)
        for op in ("corrupt_spans", "bart_noise")
        for change, words in (
            (dict(max_seqlen=None), "`max_seqlen` got None"),
            (dict(max_seqlen=4), "`max_seqlen` got 4; expected at least 5"),
            (dict(lengths=ids(4, 5)), "`lengths` got a tensor"),
            (dict(sample_index=ids(0, 1, 2)), "`sample_index` got shape (3,)"),
        )
    ),
]
CALLS = [
    pytest.param(op, argument, value, id=f"{op}-{argument}-{place}")
    for op, (_, arguments) in OPS.items()
    for argument, values in arguments.items()
    for place, value in enumerate(values)
]
CHOICES = ("activation", "reduction", "approximate", "sampling", "unit", "divergence")


@pytest.mark.parametrize("op", OPS)
def test_the_call_is_right_but_for_that(op):
    given, _ = OPS[op]
    getattr(ops, op)(**given)
    if op in PACKED:
        getattr(ops, op)(**PACKED[op])


def fails(function, given: dict) -> str:
    """The message of the error."""
    with pytest.raises(fastplm.FastplmError) as caught:
        function(**given)
    said = str(caught.value)
    assert (
        said.startswith(getattr(function, "__name__", "attention").replace("attend", "attention"))
        and "; expected" in said
    )
    assert isinstance(caught.value, (ValueError, TypeError))
    return f"{type(caught.value).__name__}: {said}"


@pytest.mark.parametrize("op, argument, value", CALLS)
def test_ops_name_the_argument(op, argument, value):
    given = dict(OPS[op][0])
    if op.startswith("attention") and argument == "seed":
        given["dropout_p"] = 0.1
    said = fails(getattr(ops, op), given | {argument: value})
    got = said.split("; expected")[0]
    assert f"`{argument}" in got
    if not isinstance(value, tuple):
        assert any(f"got {one}" in got for one in ways_to_say(value))
    if value is None or isinstance(value, str | list | bool):
        assert said.startswith("ArgumentValue" if argument in CHOICES else "ArgumentType")


def ways_to_say(value) -> list:
    ways = [repr(value), value, f"a {type(value).__name__}"]
    if isinstance(value, torch.Tensor):
        ways += [f"{value.dim()} dimensions", f"shape {tuple(value.shape)}", value.dtype]
        ways += [
            "ids that do not rise",
            "position",
            "target",
            "values that fall",
            "a tensor",
            "id -1",
            "index",
        ]
        ways += value.flatten()[:5].tolist()
    return ways


@pytest.mark.parametrize("op, change, words", TOGETHER)
def test_ops_name_what_does_not_fit_the_rest(op, change, words):
    assert words in fails(getattr(ops, op), OPS[op][0] | change)


@each_sample()
def test_declared_tensors_name_themselves(sample):
    """A tensor of another kind, dtype, number of dimensions, device or size is named."""
    inputs, signature = sample.make(9, torch.float32), OPS_OF[sample.op].arguments
    packed = "cu_seqlens" in inputs or "cu_seqlens_q" in inputs
    declared = signature.packed_tensors if packed else signature.tensors
    given = [(signature.names[one.place], one) for one in declared]
    given = [(name, one) for name, one in given if isinstance(inputs.get(name), torch.Tensor)]
    sizes = [letter for _, one in given if one.shape for letter, _ in one.shape.sizes]
    for field, one in given:
        tensor = inputs[field]
        ranked = one.shape is not None and not one.shape.leading and one.name != "bias"
        wrong = [(tensor.to(torch.complex64), "torch.complex64")]
        wrong += [([1.0], "a list")] * (field != "seed")
        wrong += [(tensor[None], f"{tensor.dim() + 1} dimensions")] * ranked
        wrong += [(tensor.to("meta"), "device meta")] * (one.place > 0)
        wrong += [(tensor.double(), "torch.float64")] * (one.dtype_of is not None)
        for value, words in wrong:
            said = fails(sample.function, inputs | {field: value})
            assert f"`{one.name}` got {words}" in said
        for at, (letter, _) in enumerate(one.shape.sizes if ranked else ()):
            if sizes.count(letter) > 1:
                size = [length + (place == at) for place, length in enumerate(tensor.shape)]
                said = fails(sample.function, inputs | {field: tensor.new_zeros(size)})
                assert said.startswith("ArgumentValue") and " got shape (" in said


#: Functions from a dense tensor to one of another kind.
OTHER_TENSORS = {
    "sparse": lambda value: value.to_sparse(),
    "csr": lambda value: value.to_sparse_csr(),
    "nested": lambda value: torch.nested.nested_tensor([value, value]),
    "jagged": lambda value: torch.nested.nested_tensor([value, value], layout=torch.jagged),
}


def wrong_kinds():
    """(op, argument, a value of another kind) for every argument with an annotation."""
    for op, (given, _) in OPS.items():
        for name, parameter in inspect.signature(getattr(ops, op)).parameters.items():
            kinds, value = parameter.annotation.split(" | "), given.get(name)
            wrong = []
            if "bool" in kinds:
                wrong = ["yes", 1, None, [1.0], zeros(2)]
            elif "Tensor" not in kinds and {"int", "float"}.intersection(kinds):
                wrong = ["1", [1.0], {}, 1j, zeros(2), *([] if "None" in kinds else [None])]
                wrong += [INF, HUGE, 10**5000] if kinds == ["int"] else []
            elif isinstance(value, torch.Tensor):
                # Compressed rows need a matrix, and a nested tensor needs a dimension to cut.
                least = {"csr": 2, "jagged": 1}
                wrong = [kind for kind in OTHER_TENSORS if value.dim() >= least.get(kind, 0)]
                wrong = [kind for kind in wrong if kind != "csr" or value.dim() == 2]
            for place, value in enumerate(wrong):
                yield pytest.param(op, name, value, id=f"{op}-{name}-{place}")


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state)")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op, argument, value", list(wrong_kinds()))
def test_every_kind_of_argument_is_checked(op, argument, value, device):
    given = dict(OPS[op][0])
    if isinstance(given.get(argument), torch.Tensor):
        value = OTHER_TENSORS[value](given[argument])
    if device == "meta":
        given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    said = fails(getattr(ops, op), given | {argument: value})
    assert f"`{argument}` got " in said and "\n" not in said and len(said) < 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, argument, value", [("attention", "is_causal", "yes"), ("maxsim", "normalize", "yes")]
)
def test_kinds_are_checked_where_a_call_is_compiled(op, argument, value):
    function = getattr(ops, op)
    call = torch.compile(lambda given: function(**given, **{argument: value}), backend="eager")
    with pytest.raises(TypeError, match=rf"`{argument}` got 'yes'; expected a bool"):
        call(OPS[op][0])


@pytest.mark.parametrize(
    "op, change",
    [
        ("attention_varlen", dict(cu_seqlens_q=ends(0, 9, 5))),
        ("attention_varlen", dict(max_seqlen_k=2)),
        ("maxsim", dict(cu_seqlens_q=ends(0, 9, 5))),
        ("gather_rows", dict(positions=ids(0, 4))),
        ("linear_cross_entropy", dict(target=ids(0, 1, -100, 6))),
        ("mask_tokens", PACKED["mask_tokens"] | dict(cu_seqlens=ends(0, 4, 10))),
    ],
)
def test_a_compiled_call_looks_at_values_when_it_runs(op, change):
    torch._dynamo.reset()
    function, right = getattr(ops, op), PACKED.get(op, OPS[op][0])
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    compiled(**right)
    (name,) = (name for name, value in change.items() if value is not right.get(name))
    with pytest.raises(ValueError, match=f"{op}: `{name}` got"):
        compiled(**right | change)


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


#: (class, its arguments, the argument that the message names).
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
