"""A pre-training step of every family, forward and backward, against Transformers' own models.

All variants have the same weights and see the same batch: random tokens, with the case's share of
padding at the right. A GPU runs the published sizes, in bf16 by autocast with dropout 0.1; a CPU
runs a narrow model with the real vocabulary. FLOPs are counted by ``fastplm.run.flops``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import MaskedLMOutput

from fastplm import models
from fastplm._budget import RMS_FACTOR
from fastplm.pretrain.presets import FAMILIES as PUBLISHED
from fastplm.pretrain.presets import PRESETS, configuration
from fastplm.run.flops import MASKED, training_flops
from fastplm.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    BudgetExceeded,
    ReversedReductions,
    check_error,
)
from harness import SESSION, Case, Unavailable, default_device, peak_flops

GPU = default_device().type == "cuda"
MASK_ID = 103
IGNORED = -100

if GPU:  # every case compiles the same functions for its own shapes
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024

Batch = dict[str, Tensor]
Config = Any
#: The names that configurations have for a number of layers.
_DEPTHS = "num_hidden_layers encoder_layers decoder_layers num_decoder_layers".split()


def _is_joint(config: Config) -> bool:
    return hasattr(config, "discriminator")


@dataclass(frozen=True)
class Step:
    """A batch of ``batch`` x ``seqlen`` tokens, a share ``padding`` of them padding, for a model.

    Args:
        arch: family and size, as in ``fastplm.pretrain.presets``.
        vocab: size of the model's vocabulary; None = the published one.
        layers: of the model, on each side or in each part; None = the published number.
    """

    arch: str
    batch: int
    seqlen: int
    padding: float = 0.0
    dropout: float = 0.0
    bf16: bool = False
    vocab: int | None = None
    layers: int | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.arch.rpartition("-")[0]]

    @property
    def small(self) -> Step:
        """A step of the same family, small enough for fp64, and without dropout."""
        arch = f"{self.arch.rpartition('-')[0]}-tiny"
        return Step(arch, 4, 16, padding=0.3, bf16=self.bf16, vocab=1999)

    def config(self) -> Config:
        made = configuration(
            self.arch,
            vocab_size=self.vocab or PUBLISHED[PRESETS[self.arch].family].vocab_size,
            dropout=self.dropout,
            attention_dropout=self.dropout,
        )
        if self.family.batch is masked and _is_joint(made):
            made = made.discriminator
        made.use_cache = False  # a training reads no cache
        if self.layers is not None:
            for part in (made.generator, made.discriminator) if _is_joint(made) else (made,):
                for name in _DEPTHS:
                    if hasattr(part, name):
                        setattr(part, name, self.layers)
                if hasattr(part, "layer_types"):
                    part.layer_types = part.layer_types[: self.layers]
        return made

    def lengths(self) -> Tensor:
        """The lengths [B], evenly spread around their mean, the longest ``seqlen`` if possible."""
        mean = self.seqlen * (1 - self.padding)
        spread = min(self.seqlen - mean, mean - 2)
        steps = torch.linspace(-1, 1, self.batch)
        return (mean + spread * steps).round().long()

    def target_lengths(self) -> Tensor:
        """The lengths [B] of the decoder."""
        return (self.lengths() * self.family.target_share).long().clamp(min=2)

    @property
    def flops(self) -> int:
        """The FLOPs of forward and backward."""
        targets = self.target_lengths().tolist() if self.family.target_share else ()
        return training_flops(self.config(), self.lengths().tolist(), targets, masked=MASKED)

    @property
    def tokens(self) -> int:
        """The number of tokens of encoder and decoder together, without padding."""
        decoded = int(self.target_lengths().sum()) if self.family.target_share else 0
        return int(self.lengths().sum()) + decoded

    def make(self, device: torch.device) -> Batch:
        made = self.family.batch(self, self.config())
        return {name: value.to(device) for name, value in made.items()}


# --- batches --------------------------------------------------------------------------------------


def _text(
    lengths: Tensor, seqlen: int, config: Config, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids [B, T], and the mask of the ids that are not padding."""
    vocab, shape = config.vocab_size, (len(lengths), seqlen)
    ids = torch.randint(min(1000, vocab // 2), vocab, shape, generator=generator)
    mask = torch.arange(seqlen) < lengths[:, None]
    return ids.masked_fill(~mask, config.pad_token_id), mask


def masked(step: Step, config: Config) -> Batch:
    """A share of the tokens is masked and has labels. Their positions are in the batch, as from
    ``ops.mask_tokens``."""
    generator = torch.Generator().manual_seed(0)
    config = getattr(config, "discriminator", config)
    ids, mask = _text(step.lengths(), step.seqlen, config, generator)
    chosen = (torch.rand(ids.shape, generator=generator) < MASKED) & mask
    return {
        "input_ids": ids.masked_fill(chosen, MASK_ID),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~chosen, IGNORED),
        "masked_positions": chosen.flatten().nonzero().flatten(),
    }


def replaced(step: Step, config: Config) -> Batch:
    """The same, with the sample indices, by which the generator's tokens are drawn."""
    return {**masked(step, config), "sample_index": torch.arange(step.batch)}


def causal(step: Step, config: Config) -> Batch:
    """Every token but the first has a label."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = _text(step.lengths(), step.seqlen, config, generator)
    labels = ids.masked_fill(~mask, IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def translated(step: Step, config: Config) -> Batch:
    """The decoder predicts other tokens than the encoder reads."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = _text(step.lengths(), step.seqlen, config, generator)
    lengths = step.target_lengths()
    targets, written = _text(lengths, int(lengths.max()), config, generator)
    labels = targets.masked_fill(~written, IGNORED)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How a family is pre-trained.

    Args:
        model: name of the class, in Transformers and here.
        batch: the inputs of a step.
        target_share: tokens of the decoder for each token of the encoder; 0 = no decoder.
        attention: the best one that Transformers has.
    """

    model: str
    batch: Callable[[Step, Config], Batch]
    target_share: float = 0.0
    attention: str = "sdpa"


FAMILIES = {
    "bert": Family("BertForMaskedLM", masked),
    "roberta": Family("RobertaForMaskedLM", masked),
    "albert": Family("AlbertForMaskedLM", masked),
    "electra": Family("ElectraForJointPreTraining", replaced),
    "gpt2": Family("GPT2LMHeadModel", causal),
    # In Raffel et al. 2020, an input of 512 tokens with spans left out has 114 tokens of targets.
    "t5": Family("T5ForConditionalGeneration", translated, 114 / 512),
    "bart": Family("BartForConditionalGeneration", translated, 1.0),
    "distilbert": Family("DistilBertForMaskedLM", masked),
    "xlm-roberta": Family("XLMRobertaForMaskedLM", masked),
    "modernbert": Family("ModernBertForMaskedLM", masked),
    # Its preset learns by replaced tokens; Transformers has the masked-LM model alone.
    "deberta-v3": Family("DebertaV2ForMaskedLM", masked, attention="eager"),
}


# --- models ---------------------------------------------------------------------------------------


class PlainElectra(nn.Module):
    """Generator and discriminator of Transformers, trained jointly by hand-written code.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2 and §3.2.
    """

    def __init__(self, config: Config, attention: str) -> None:
        super().__init__()
        self.generator: Any = transformers.ElectraForMaskedLM._from_config(
            config.generator, attn_implementation=attention
        )
        self.discriminator: Any = transformers.ElectraForPreTraining._from_config(
            config.discriminator, attn_implementation=attention
        )
        ours, theirs = (part.electra.embeddings for part in (self.generator, self.discriminator))
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            setattr(ours, table, getattr(theirs, table))
        self.generator.generator_lm_head.weight = theirs.word_embeddings.weight
        self.weight = config.discriminator_weight

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        replaced_ids: Tensor | None = None,
    ) -> MaskedLMOutput:
        """``replaced_ids`` replace the draws, if two models must see the same tokens."""
        out = self.generator(input_ids, attention_mask=attention_mask, labels=labels)
        originals = torch.where(labels == IGNORED, input_ids, labels)
        if replaced_ids is None:
            with torch.no_grad():
                chosen = labels != IGNORED
                drawn = torch.multinomial(out.logits[chosen].float().softmax(-1), 1)
                replaced_ids = originals.masked_scatter(chosen, drawn)
        judged = self.discriminator(
            replaced_ids,
            attention_mask=attention_mask,
            labels=(replaced_ids != originals).long(),
        )
        return MaskedLMOutput(loss=out.loss + self.weight * judged.loss)


def build(step: Step, kind: str, device: torch.device, seed: int = 0) -> nn.Module:
    """A model for a step: of "fastplm", or of Transformers with the attention of that name.

    Models of one seed have the same weights.
    """
    name, config = step.family.model, step.config()
    with torch.device(device):
        torch.manual_seed(seed)
        if kind == "fastplm":
            made = getattr(models, name)(config)
        elif step.family.batch is replaced:
            made = PlainElectra(config, kind)
        else:
            best = step.family.attention if kind == "sdpa" else kind
            made = getattr(transformers, name)._from_config(config, attn_implementation=best)
    if kind == "fastplm":
        made.load_state_dict(build(step, "eager", device, seed).state_dict())
    return made.train()


# Three models are kept: a case has three kinds, and the next cases use the same ones or others.
@functools.lru_cache(maxsize=3)
def _cached(step: Step, kind: str, device: torch.device) -> nn.Module:
    return build(step, kind, device)


def model(step: Step, kind: str, device: torch.device) -> nn.Module:
    """``build``, once for all batches of a model."""
    return _cached(replace(step, batch=1, seqlen=1, padding=0.0, bf16=False), kind, device)


# More models than a case has, as gates compile small ones in between.
@functools.lru_cache(maxsize=16)
def compiled(used: nn.Module) -> Callable:
    # With dynamic shapes, the second case would be compiled, and measured, for any length.
    return torch.compile(used, dynamic=False, backend="inductor" if GPU else "eager")


# --- what is compared -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """One variant of a step.

    Args:
        kind: the model, as for ``build``.
        room: give fastplm's model the largest number of tokens, so that it waits for no device.
        compiled: compile the model with ``torch.compile``.
    """

    kind: str
    room: bool = False
    compiled: bool = False

    def check(self) -> None:
        """Raise Unavailable if this variant is not measured."""
        if self.compiled and not GPU:
            raise Unavailable("compiled models are compared on a GPU")
        if self.compiled and not SESSION.full:
            raise Unavailable("compiling takes a minute a shape: with --full alone")

    def loss(self, used: nn.Module, step: Step, batch: Batch) -> Tensor:
        """The loss of a batch; its ``replaced_ids`` are for Transformers alone."""
        inputs: dict[str, Any] = dict(batch)
        if self.kind == "fastplm":
            inputs.pop("replaced_ids", None)
        else:
            for name in ("masked_positions", "sample_index"):
                inputs.pop(name, None)
        if self.room:
            inputs |= self._room(step)
        return (compiled(used) if self.compiled else used)(**inputs).loss

    def _room(self, step: Step) -> dict[str, int]:
        sides = {"unpad": step.lengths()}
        if step.family.target_share:
            sides["decoder_unpad"] = step.target_lengths()
        # A sixteenth more than this batch has, as another batch may have more tokens.
        return {name: int(lengths.sum()) * 17 // 16 for name, lengths in sides.items()}


PATHS = {
    "eager": Path("eager"),
    "transformers sdpa": Path("sdpa"),
    "transformers compiled": Path("sdpa", compiled=True),
    "fastplm": Path("fastplm"),
    "fastplm, room given": Path("fastplm", room=True),
    "fastplm compiled": Path("fastplm", room=True, compiled=True),
}
if not GPU:  # on a CPU, counting the tokens waits for nothing
    del PATHS["fastplm, room given"]


def backward(
    path: Path, used: nn.Module, step: Step, batch: Batch, bf16: bool | None = None
) -> Tensor:
    """The loss, 0-d; the gradients are in the model's parameters."""
    used.zero_grad(set_to_none=True)
    enabled = step.bf16 if bf16 is None else bf16
    device = batch["input_ids"].device.type
    with torch.enable_grad(), torch.autocast(device, torch.bfloat16, enabled=enabled):
        loss = path.loss(used, step, batch)
        loss.backward()
    return loss.detach()


def variant(step: Step, path: Path) -> Callable[..., Tensor]:
    def run(**batch: Tensor) -> Tensor:
        path.check()
        return backward(path, model(step, path.kind, batch["input_ids"].device), step, batch)

    run.path = path
    return run


# --- the gate -------------------------------------------------------------------------------------


class KeptDouble(TorchFunctionMode):
    """In fp64 nothing may be rounded to fp32, as a loss with ``logits.float()`` would do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def gate(step: Step, candidate: Callable, eager: Callable, inputs: Batch) -> None:
    """Check the loss and every gradient of a small model, without dropout, by the error budget.

    ``step`` is the small one. In bf16 the gradients of several models are compared together, as the
    error of a single one is chance in 16 bits.
    """
    candidate.path.check()
    passes(step, candidate.path, inputs["input_ids"].device)


@functools.cache
def passes(step: Step, path: Path, device: torch.device) -> None:
    """Check once for all cases of a family; after a failure, check again."""
    batch = step.make(device)
    check_in_fp32(step, path, batch)
    if step.bf16:
        check_in_bf16(step, path, batch)


def check_in_fp32(step: Step, path: Path, batch: Batch) -> None:
    device = batch["input_ids"].device
    ours = build(step, path.kind, device)
    batch = _with_replacements(step, ours, batch, bf16=False)

    def results(path: Path, used: nn.Module) -> dict[str, Tensor]:
        loss = backward(path, used, step, batch, bf16=False)
        found = used.named_parameters()
        return {"loss": loss, **{name: p.grad for name, p in found if p.grad is not None}}

    parents = {kind: build(step, kind, device) for kind in ("eager", "sdpa")}
    with KeptDouble():
        gold = results(Path("eager"), copy.deepcopy(parents["eager"]).double())
    bases = [results(Path(kind), parent) for kind, parent in parents.items()]
    with ReversedReductions():
        bases += [results(Path(kind), parent) for kind, parent in parents.items()]
    out = results(path, ours)
    if out.keys() != gold.keys():
        raise BudgetExceeded(f"other gradients: {sorted(out.keys() ^ gold.keys())}")
    # The budget needs only the two gradients with the largest norms, for comparison.
    grads = [value for name, value in gold.items() if name != "loss"]
    siblings = [max(grads, key=size) for size in (_largest, _mean_square)]
    for name, value in out.items():
        factor, related = (FORWARD_FACTOR, ()) if name == "loss" else (GRADIENT_FACTOR, siblings)
        check_error(name, value, gold[name], [base[name] for base in bases], factor, related)


def _largest(value: Tensor) -> float:
    return float(value.abs().max())


def _mean_square(value: Tensor) -> float:
    return float(value.square().mean())


def check_in_bf16(step: Step, path: Path, batch: Batch, seeds: int = 4) -> None:
    device = batch["input_ids"].device
    ours, theirs = 0.0, 0.0
    for seed in range(seeds):
        used = build(step, path.kind, device, seed)
        its_batch = _with_replacements(step, used, batch, bf16=True)

        def gradient(path: Path, used: nn.Module, bf16: bool = True, batch=its_batch) -> Tensor:
            backward(path, used, step, batch, bf16)
            grads = [p.grad for p in used.parameters() if p.grad is not None]
            return torch.cat([grad.double().flatten() for grad in grads])

        parents = {kind: build(step, kind, device, seed) for kind in ("eager", "sdpa")}
        with KeptDouble():
            gold = gradient(Path("eager"), copy.deepcopy(parents["eager"]).double(), bf16=False)
        errors = [gradient(Path(kind), parent) - gold for kind, parent in parents.items()]
        theirs += max(float(error.norm()) for error in errors) / float(gold.norm())
        ours += float((gradient(path, used) - gold).norm()) / float(gold.norm())
    if not ours <= RMS_FACTOR * theirs:
        raise BudgetExceeded(
            f"gradients in bf16: relative error {ours / seeds:.2e}, budget "
            f"{RMS_FACTOR * theirs / seeds:.2e} (Transformers has {theirs / seeds:.2e})"
        )


def _with_replacements(step: Step, ours: Any, batch: Batch, bf16: bool) -> Batch:
    """The batch with the tokens that fastplm's generator draws, for the other models."""
    if step.family.batch is not replaced:
        return batch
    device = batch["input_ids"].device.type
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=bf16):
        out = ours(**batch, output_replaced_ids=True)
    return {**batch, "replaced_ids": out.replaced_ids}


# --- cases ----------------------------------------------------------------------------------------

PADDINGS = (0.0, 0.3, 0.5)
#: Published sizes, and their numbers of sequences of 128 and of 512 tokens on a GPU.
SIZES = {
    "bert": (("base", 256, 64), ("large", 256, 64)),
    "roberta": (("base", 256, 64),),
    "albert": (("base", 256, 64),),
    "electra": (("small", 128, 32), ("base", 256, 64)),
    "gpt2": (("small", 256, 64),),
    "t5": (("base", 256, 64),),
    "bart": (("base", 256, 64),),
    "distilbert": (("base", 256, 64),),
    "xlm-roberta": (("base", 256, 64),),
    "modernbert": (("base", 256, 64),),
    "deberta-v3": (("base", 256, 64),),
}
#: Sizes on a CPU: tiny if the vocabulary is large and all rows are predicted, and for ELECTRA,
#: which has no mini.
NARROW = {
    "bert": "mini",
    "roberta": "mini",
    "albert": "mini",
    "electra": "tiny",
    "gpt2": "tiny",
    "t5": "mini",
    "bart": "tiny",
    "distilbert": "mini",
    "xlm-roberta": "tiny",
    "modernbert": "mini",
    "deberta-v3": "tiny",
}
#: The share of the data sheet's FLOP/s that a step without padding must reach on an H200.
MUST_REACH = {"bert-base": 0.42, "bert-large": 0.47}


def case(step: Step, full: bool = False) -> Case:
    family, _, size = step.arch.rpartition("-")
    flops = step.flops
    precision = "bf16" if step.bf16 else "fp32"
    targets, peak = {}, peak_flops(default_device(), torch.bfloat16)
    if peak and step.arch in MUST_REACH and not step.padding:
        floor = 1e6 * flops / peak
        targets["training"] = (round(floor), round(floor / MUST_REACH[step.arch]))
    return Case(
        op=family,
        label=f"{size} {step.batch}x{step.seqlen} padding {step.padding:.0%} "
        f"dropout {step.dropout:g} {precision}",
        make=step.make,
        make_small=step.small.make,
        variants={name: variant(step, path) for name, path in PATHS.items()},
        gated=tuple(name for name, path in PATHS.items() if path.kind == "fastplm"),
        gate=functools.partial(gate, step.small),
        directions=("training",),
        training_flops=flops,
        dtype=torch.bfloat16 if step.bf16 else torch.float32,
        tokens=step.tokens,
        rounds=10 if GPU else 5,
        replayed=False,
        full=full,
        targets=targets,
    )


def cases(family: str) -> list[Case]:
    """The cases of this machine."""
    if GPU:
        return [
            case(Step(f"{family}-{size}", batch, seqlen, padding, 0.1, bf16=True))
            for size, *batches in SIZES[family]
            for batch, seqlen in zip(batches, (128, 512), strict=True)
            for padding in PADDINGS
        ]
    narrow = Step(f"{family}-{NARROW[family]}", 4, 128)
    return [
        case(replace(narrow, padding=padding, dropout=0.1, bf16=bf16))
        for bf16 in ((False, True) if family == "bert" else (False,))
        for padding in (0.0, 0.5)
    ]
