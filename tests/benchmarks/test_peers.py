"""Every peer gives the reference's results, or says why it does not; the targets are there.

Functions with the signatures of the libraries that need a GPU call the references here: these tests
check the adapters, that is the layout, the order of the arguments and the options.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import test_attention
import test_gather_rows
import test_linear_cross_entropy
import test_mask_tokens
import test_replaced_token_loss
import torch

import harness
import peers
from fastplm.reference.attention import attention_ref, attention_varlen_ref
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref
from harness import Case, Differs, Unavailable, default_device

DEVICE = default_device()


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Rows and seconds of compiling do not pass from test to test; nothing compiles."""
    monkeypatch.setattr(harness, "SESSION", harness.Session())
    monkeypatch.setattr(peers.Peer, "spent", type(peers.Peer.spent)())
    monkeypatch.setattr(peers, "_compile", lambda function, **options: function)


@pytest.fixture
def install(monkeypatch):
    """Installs a module of functions, and makes the device count as a GPU."""
    monkeypatch.setattr(peers, "_needs_cuda", lambda: None)

    def install(name, **members):
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    return install


def answer(peer, inputs):
    """(None, the reason), or (the result, ""), which the peer has compared with the reference."""
    with torch.no_grad():
        try:
            return peer(**inputs), ""
        except Unavailable as reason:
            return None, str(reason)


# --- attention ------------------------------------------------------------------------------------

PLAIN = test_attention.Shape(2, 2, 17, 17, dim=16)
SHAPES = {
    "plain": PLAIN,
    "padded": replace(PLAIN, padding=0.3),
    "ragged": replace(PLAIN, padding=0.3, ragged=True),
    "ragged cross": replace(PLAIN, seqlen_q=5, padding=0.3, ragged=True),
    "causal": replace(PLAIN, is_causal=True),
    "cross": replace(PLAIN, seqlen_q=5),
    "decode": replace(PLAIN, seqlen_q=1, is_causal=True),
    "dropout": replace(PLAIN, dropout_p=0.1),
    "bias": replace(PLAIN, bias=True),
    "prefix": replace(PLAIN, prefix=True),
}
#: The shapes that a peer says it does not support.
REFUSED = {
    "sdpa": {"ragged", "ragged cross"},
    "sdpa math": {"ragged", "ragged cross"},
    "varlen_attn": {"padded", "dropout", "bias", "prefix"},
    "flex_attention": {"dropout"},
    "flash-attn": {"padded", "bias", "prefix"},
    "flash-attn 3": {"padded", "bias", "dropout", "prefix"},
    "xformers": {"prefix"},
}


def attend(name, shape):
    exact = replace(shape, dropout_p=0.0)
    reference = test_attention.over(exact, attention_ref, attention_varlen_ref)
    peer = peers.attention([name], shape, reference)[name]
    return answer(peer, shape.make(DEVICE))


@pytest.fixture
def attention_libraries(install, monkeypatch):
    def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attention_ref(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    def flash_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
    ):
        cuts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return attention_varlen_ref(q, k, v, *cuts, is_causal=causal, scale=softmax_scale)

    def flash_3(q, k, v, softmax_scale=None, causal=False):
        return flash(q, k, v, 0.0, softmax_scale, causal), "log-sum-exp"

    def varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
    ):
        cuts = cu_seq_q, cu_seq_k, max_q, max_k
        is_causal = window_size == (-1, 0)
        return attention_varlen_ref(query, key, value, *cuts, is_causal=is_causal, scale=scale)

    class BlockDiagonalMask:
        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen):
            made = cls()
            made.lengths = q_seqlen, kv_seqlen
            return made

        def visible(self, rows, columns):
            blocks = [torch.ones(q, k) for q, k in zip(*self.lengths, strict=True)]
            return torch.block_diag(*blocks).bool()

    class LowerTriangularFromBottomRightMask:
        def visible(self, rows, columns):
            return torch.ones(rows, columns).tril(columns - rows).bool()

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
        if isinstance(attn_bias, torch.Tensor):
            assert attn_bias.shape == scores.shape
            scores = scores + attn_bias
        elif attn_bias is not None:
            visible = attn_bias.visible(*scores.shape[2:]).to(scores.device)
            scores = scores.masked_fill(~visible, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    install("flash_attn", flash_attn_func=flash, flash_attn_varlen_func=flash_varlen)
    install("flash_attn_interface", flash_attn_func=flash_3, flash_attn_varlen_func=flash_varlen)
    install("xformers")
    install("xformers.ops", memory_efficient_attention=memory_efficient_attention)
    install(
        "xformers.ops.fmha.attn_bias",
        BlockDiagonalMask=BlockDiagonalMask,
        LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", peers.ATTENTION)
def test_an_attention_peer_agrees_or_says_why_not(name, shape):
    out, reason = attend(name, SHAPES[shape])
    assert reason or out.isfinite().all()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-ins pass for a GPU's libraries")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_peer_takes_all_but_what_it_says(name, shape, attention_libraries):
    out, reason = attend(name, SHAPES[shape])
    assert reason.startswith("takes no " if shape in REFUSED[name] else "")
    assert (out is None) == (shape in REFUSED[name]), reason


def test_without_a_gpu_its_peers_say_so(monkeypatch):
    monkeypatch.setattr(peers, "default_device", lambda: torch.device("cpu"))
    for name in ("sdpa cudnn", "sdpa efficient", "varlen_attn"):
        assert attend(name, PLAIN) == (None, "needs CUDA")


def test_a_kernel_that_pytorch_lacks_is_no_failure():
    """SDPA's flash kernel has no gradient of a mask, which T5's bias needs."""
    shape = replace(PLAIN, bias=True)
    inputs = shape.make(torch.device("cpu"))
    inputs["weight"].requires_grad_()
    reference = test_attention.over(shape, attention_ref, attention_varlen_ref)
    peer = peers.attention(["sdpa flash"], shape, reference)["sdpa flash"]
    with pytest.raises(Unavailable, match="no such kernel in PyTorch"):
        peer(**inputs)


# --- linear cross-entropy -------------------------------------------------------------------------

LOSS = test_linear_cross_entropy.Shape(40, 300, 16)
LOSSES = {
    "plain": LOSS,
    "no bias": replace(LOSS, bias=False),
    "ignored": replace(LOSS, ignored=0.85),
    "sampled": replace(LOSS, sampled=True),
}


def lose(name, shape):
    loss = linear_cross_entropy_ref
    reference = test_linear_cross_entropy.without_sample(loss) if shape.sampled else loss
    peer = peers.linear_cross_entropy([name], shape, reference)[name]
    return answer(peer, shape.make(DEVICE))


def liger(input, weight, target, bias=None, ce_weight=None, ignore_index=-100):
    return linear_cross_entropy_ref(input, weight, target, linear_bias=bias)


def liger_of_all_rows(input, weight, target, bias=None):
    """A mean that also counts ignored rows, as Liger's loss did when it was compiled."""
    counts = (target != -100).float().mean()
    return liger(input, weight, target, bias) * counts


@pytest.fixture
def loss_libraries(install):
    def cut(e, c, targets, bias=None, filter_eps="auto", impl="cce"):
        return liger(e, c, targets, bias)

    def quack(x, weight, bias, target):
        return liger(x, weight, target, bias)

    install("liger_kernel")
    install("liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=liger)
    install("cut_cross_entropy", linear_cross_entropy=cut)
    install("quack")
    install(
        "quack.linear_cross_entropy",
        linear_cross_entropy_func=quack,
        chunked_linear_cross_entropy=liger,
    )


@pytest.mark.parametrize("shape", LOSSES)
@pytest.mark.parametrize("name", peers.LINEAR_CROSS_ENTROPY)
def test_a_loss_agrees_or_says_why_not(name, shape):
    out, reason = lose(name, LOSSES[shape])
    assert reason or out[0 if shape == "sampled" else ()].isfinite()


@pytest.mark.parametrize("shape", LOSSES)
@pytest.mark.parametrize("name", peers.LINEAR_CROSS_ENTROPY)
def test_a_loss_takes_all_but_what_it_says(name, shape, loss_libraries):
    out, reason = lose(name, LOSSES[shape])
    refused = shape == "sampled" and not name.startswith("full logits")
    refused |= name == "quack chunked" and shape in ("plain", "ignored")
    if name.startswith("F.linear") and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        refused = True
    assert (out is None) == refused, reason


# --- rows -----------------------------------------------------------------------------------------


def row_of(name, shape=LOSSES["ignored"]):
    """The row of a peer, measured beside the reference."""
    found = peers.linear_cross_entropy([name], shape, linear_cross_entropy_ref)
    case = Case(
        op="linear_cross_entropy",
        label="tiny",
        make=shape.make,
        make_small=shape.make_small,
        variants={"eager": linear_cross_entropy_ref, **found},
        gated=(),
        wrt=shape.learned,
    )
    eager, row = harness.measure(case, "training", rounds=1)
    assert eager.status == "ok" and eager.p50_us > 0
    return row


def test_a_peer_that_agrees_has_a_speed(loss_libraries):
    row = row_of("liger-kernel")
    assert row.status == "ok" and row.p50_us > 0


def test_a_wrong_answer_is_a_row_that_says_so_and_no_speed(loss_libraries, install):
    install(
        "liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=liger_of_all_rows
    )
    row = row_of("liger-kernel compiled")
    assert row.status.startswith("differs: off by ")
    assert row.p50_us is None and row.vs_eager is None


def test_a_library_that_is_not_there_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert row_of("liger-kernel").status == "skipped: liger-kernel is not installed"
    assert row_of("quack").status == "skipped: quack-kernels is not installed"


def test_a_library_that_does_not_import_is_a_row_that_says_so(install):
    install("liger_kernel", __path__=[])
    status = row_of("liger-kernel").status
    assert status.startswith("skipped: liger-kernel does not import: No module named")


def test_compiling_is_rationed(monkeypatch):
    def peer(name):
        return peers.Peer(name, lambda: torch.square, torch.square, compiles=True)

    inputs = {"input": torch.ones(3)}
    peers.Peer.spent["slow"] = peers.COMPILE_SECONDS
    peer("other")(**inputs)
    with pytest.raises(Unavailable, match="compiling has had its"):
        peer("slow")(**inputs)
    monkeypatch.setattr(peers, "SESSION", harness.Session(full=True))
    peer("slow")(**inputs)


def test_a_peer_may_err_as_the_reference_does_and_no_more():
    inputs = {"x": torch.randn(1000, 64).bfloat16()}

    def reference(x):
        return x.exp().sum(1)

    out = reference(**inputs)
    peers.hold(out, reference, inputs)
    peers.hold(reference(inputs["x"].double()).bfloat16(), reference, inputs)
    for wrong in (out * 1.1, out.masked_fill(out == out[7], float("nan")), out[1:], out.roll(1)):
        with pytest.raises(Differs):
            peers.hold(wrong, reference, inputs)


# --- targets --------------------------------------------------------------------------------------

#: Microseconds on an H200: floor, must, stretch, for forward and for backward.
ATTENTION = {
    "BERT-base 256x128": ((256, 12, 128, 128), (47, 60, 54), (82, 125, 105)),
    "BERT-base 64x512": ((64, 12, 512, 512), (65, 128, 110), (163, 380, 300)),
    "ALBERT-xxlarge 16x512": ((16, 64, 512, 512), (87, 172, 146), (218, 505, 400)),
    "ELECTRA-small 128x128": ((128, 4, 128, 128), (8, 14, 11), (16, 26, 22)),
    # 10 % and 20 % above BERT-base 64x512; the goals are 5 % and 12 %.
    "T5-base 64x512": ((64, 12, 512, 512), (65, 140.8, 115.5), (163, 456, 336)),
    "GPT-2 16x1024 causal": ((16, 12, 1024, 1024), (33, 80, 65), (82, 215, 175)),
    "cross 128x512": ((64, 12, 128, 512), (30, 42, 36), (59, 95, 80)),
    "cross 512x128": ((64, 12, 512, 128), (30, 42, 36), (59, 95, 80)),
    "BERT-base 256x128 dropout 0.1": ((256, 12, 128, 128), (47, 66, 59.4), (82, 137.5, 115.5)),
    "BERT-base 64x512 dropout 0.1, ragged": (
        (64, 12, 512, 512),
        (65, 143.4, 123.2),
        (163, 425.6, 336),
    ),
}
#: Microseconds for forward and backward together.
LINEAR_CROSS_ENTROPY = {
    "BERT-base N 4915": ((4915, 30522, 768), (880, 1150, 1000)),
    "BERT-large N 4915": ((4915, 30522, 1024), (1170, 1500, 1320)),
    "RoBERTa-base N 4915": ((4915, 50265, 768), (1440, 1900, 1650)),
    "GPT-2 N 16384": ((16384, 50257, 768), (4800, 6200, 5500)),
    "ELECTRA-small generator N 2458": ((2458, 30522, 128), (73, 240, 170)),
    "ELECTRA-small generator N 2458, with sample": ((2458, 30522, 128), (110, 270, 190)),
}
#: Floor and must by direction.
SMALL = {
    test_replaced_token_loss: {"training": (23, 29)},
    test_mask_tokens: {"forward": (2.5, 6)},
    test_gather_rows: {"forward": (3.5, 5), "backward": (13.5, 16)},
}


@pytest.mark.parametrize("label", ATTENTION)
def test_attention_has_its_targets_and_every_peer(label):
    sizes, forward, backward = ATTENTION[label]
    case, *rest = (case for case in test_attention.gpu_cases() if case.label == label)
    shape = case.make.__self__
    assert (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k) == sizes and shape.dim == 64
    for direction, expected in (("forward", forward), ("backward", backward)):
        assert case.targets[direction] == pytest.approx(expected), direction
    features = shape.bias, shape.is_causal, shape.dropout_p > 0, shape.ragged
    named = [word in label for word in ("T5", "causal", "dropout", "ragged")]
    assert list(features) == named
    names = {"eager", "fastplm", "compiled", *peers.ATTENTION}
    if shape.dropout_p:  # FlexAttention has no dropout
        names -= {"compiled", "flex_attention"}
    assert names <= set().union(*(each.variants for each in (case, *rest)))


def test_attention_is_measured_with_padding_dense_and_ragged():
    labels = {case.label for case in test_attention.gpu_cases()}
    for shape in ("BERT-base 256x128", "BERT-base 64x512"):
        for share in (30, 50):
            assert f"{shape} padded {share} %" in labels
            assert f"{shape} padded {share} %, ragged" in labels


@pytest.mark.parametrize("label", LINEAR_CROSS_ENTROPY)
def test_linear_cross_entropy_has_its_targets_and_every_peer(label):
    sizes, targets = LINEAR_CROSS_ENTROPY[label]
    found = [case for case in test_linear_cross_entropy.gpu_cases() if case.label == label]
    shape = found[0].make.__self__
    assert (shape.rows, shape.vocab, shape.width) == sizes
    assert shape.sampled == ("sample" in label) and shape.bias == ("GPT-2" not in label)
    assert found[0].targets["training"] == pytest.approx(targets)
    logits = "full logits, multinomial" if shape.sampled else "full logits"
    names = {"eager", "fastplm", "compiled", logits, *test_linear_cross_entropy.PEERS}
    names |= set(test_linear_cross_entropy.COMPILING)
    assert names <= set().union(*(case.variants for case in found))


def test_the_loss_is_measured_on_masked_rows_only():
    cases = test_linear_cross_entropy.gpu_cases()
    case, *_ = (case for case in cases if case.label == "BERT-base N 32768, 85 % ignored")
    assert {"full logits on rows that count", "eager on rows that count"} <= set(case.variants)


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.__name__)
def test_the_small_kernels_have_their_targets(file):
    case, *_ = (case for case in file.gpu_cases() if case.label == "BERT-base 256x128")
    assert {d: tuple(case.targets[d]) for d in case.targets} == SMALL[file]
