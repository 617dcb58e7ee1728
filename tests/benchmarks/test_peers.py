"""Every peer gives the reference's results, or says why it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import test_attention
import test_linear_cross_entropy
import torch

import harness
import peers
from fastplm.reference.attention import attention_ref, attention_varlen_ref
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref
from harness import Case, Differs, Unavailable, default_device

DEVICE = default_device()


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


def attend(name, shape):
    exact = replace(shape, dropout_p=0.0)
    reference = test_attention.over(exact, attention_ref, attention_varlen_ref)
    peer = peers.attention([name], shape, reference)[name]
    return answer(peer, shape.make(DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", peers.ATTENTION)
def test_an_attention_peer_agrees_or_says_why_not(name, shape):
    out, reason = attend(name, SHAPES[shape])
    assert reason or out.isfinite().all()


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
def liger_is_here(install):
    install("liger_kernel")
    install("liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=liger)


@pytest.mark.parametrize("shape", LOSSES)
@pytest.mark.parametrize("name", peers.LINEAR_CROSS_ENTROPY)
def test_a_loss_agrees_or_says_why_not(name, shape):
    out, reason = lose(name, LOSSES[shape])
    assert reason or out[0 if shape == "sampled" else ()].isfinite()


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


def test_a_peer_that_agrees_has_a_speed(liger_is_here):
    row = row_of("liger-kernel")
    assert row.status == "ok" and row.p50_us > 0


def test_a_wrong_answer_is_a_row_that_says_so_and_no_speed(liger_is_here, install):
    install(
        "liger_kernel.transformers.functional", liger_fused_linear_cross_entropy=liger_of_all_rows
    )
    row = row_of("liger-kernel")
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
