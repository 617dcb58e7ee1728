"""Replaced-token pre-training of ELECTRA and DeBERTa-v3: generator and discriminator in one model,
with the ablations of ELECTRA's paper and the embedding sharing of DeBERTa-v3's."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    DebertaV2Config,
    ElectraConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from fastplm import ops
from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm._modes import values_are_known
from fastplm.errors import UnsupportedError, check_choice, fail
from fastplm.models import (
    ELECTRA_GENERATORS,
    ELECTRA_OBJECTIVES,
    ELECTRA_SECOND_STAGES,
    ELECTRA_SHARINGS,
)
from fastplm.models._base import FastplmModel, TiedLookup, check_input_ids, check_parts, fitted
from fastplm.models._encoder import EMBEDDING_TABLES
from fastplm.models._ragged import Unpad, backbone_unpad, rows_at, slots_of_labels
from fastplm.models.deberta_v2 import DebertaV2ForMaskedLM, DebertaV2ForPreTraining
from fastplm.models.electra import ElectraForMaskedLM, ElectraForPreTraining
from fastplm.nn._rows import (
    IGNORE_INDEX,
    as_normalizer,
    batch_share,
    in_fp32,
    is_plain,
    labels_at,
)
from fastplm.nn.linear import Linear
from fastplm.nn.rtd_head import rtd_loss
from fastplm.reference._reduce import reduce_loss
from fastplm.reference.philox import Stream, draw, uniform

_WHERE = "ElectraForJointPreTraining"
_PARTS = ("generator", "discriminator")
# The objectives with a loss only at the chosen positions.
_BY_LABEL = ("rtd_masked", "replace_mlm")
_CHOICES = {
    "embedding_sharing": ELECTRA_SHARINGS,
    "objective": ELECTRA_OBJECTIVES,
    "generator_type": ELECTRA_GENERATORS,
    "second_stage_from": ELECTRA_SECOND_STAGES,
}
# (an option, some of its values, another option, the values that this one may then have)
_NEEDS = (
    ("adversarial", (True,), "generator_type", ("model",)),
    ("adversarial", (True,), "stage", (None,)),
    ("adversarial", (True,), "objective", ("rtd", "rtd_masked")),
    ("generator_type", ("unigram",), "stage", (None,)),  # there is none to train first
    ("stage", (1, 2), "embedding_sharing", ("none",)),  # the second leaves the generator as it is
)
# The architectures: their configurations, and the classes that predict and that detect tokens.
_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "electra": (ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining),
    "deberta-v2": (DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2ForPreTraining),
}
# Sizes that must be equal to share embeddings, and additionally to share all weights.
_EMBEDDING_SIZES = ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size")
_WORD_SIZES = _EMBEDDING_SIZES[:2]
_ENCODER_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "hidden_act",
)


class ElectraJointConfig(PreTrainedConfig):
    """Configuration of ``ElectraForJointPreTraining``: two models and the objective.

    Below, x is the original text, m the positions chosen for prediction, x' the text whose tokens
    at m are replaced by samples of the generator. A sample equal to the original token counts as
    original.

    Args:
        generator, discriminator: ``ElectraConfig`` or ``DebertaV2Config`` (or its dict with a
            ``model_type``); vocabularies and the sizes of shared weights must be equal.
        discriminator_weight: lambda, the factor of the discriminator's loss. Default: 50 for a
            detection loss, as in the paper; 1 for a cross-entropy over the vocabulary, for which
            the paper gives no value (the generator's loss also has the factor 1).
        temperature: the temperature of the softmax from which replacements are sampled.
        sampling_seed: the seed of the replacements.
        embedding_sharing: "embeddings" (default): one set of token, position and token-type
            embeddings, of the discriminator's embedding size (§3.2, Weight Sharing) | "none" |
            "all": one encoder; needs equal sizes; each model keeps its own head | "gdes":
            gradient-disentangled embedding sharing of DeBERTa-v3: the discriminator's token
            embeddings are the generator's, without a gradient, plus a table of its own, which
            begins with zeros.
        objective: what the discriminator learns from x'.

            - "rtd" (default): whether each token is replaced, over all tokens (§2).
            - "rtd_masked": the same, only at m ("ELECTRA 15%", §3.4).
            - "replace_mlm": the original token at m, by an MLM head ("Replace MLM", §3.4).
            - "all_tokens_mlm": the original token at all positions, by an MLM head with a copy
              mechanism ("All-Tokens MLM", §3.4): a sigmoid gives the copy probability D, and
              ``p(w) = D 1[w = x'_t] + (1 - D) softmax(w)``.
        generator_type: "model" (default) | "unigram": replacements are sampled by their frequency
            in the corpus (§3.2, Smaller Generators), see ``set_token_counts``; there is no
            generator network and no generator loss.
        stage: None (default): both losses | 1: only the generator's loss | 2: only the
            discriminator's, with the generator frozen: the two-stage training of §3.2 (Training
            Algorithms). ``start_second_stage`` changes from 1 to 2. Needs
            ``embedding_sharing="none"`` and, unless ``second_stage_from="scratch"``, equal sizes.
        second_stage_from: "generator" (default): the discriminator begins with the generator's
            weights | "scratch": with its own.
        adversarial: the generator is trained to make the discriminator's loss large, by
            reinforcement learning, instead of by maximum likelihood (§3.2 and appendix F). Needs a
            detection objective, no stages, and a model as generator.

    ``ElectraJointConfig.from_discriminator`` derives the generator.

    Raises:
        ArgumentValueError: an unknown choice, or choices that cannot be combined.

    Source: Clark et al. 2020 (arXiv 2003.10555); He et al. 2021 (arXiv 2111.09543), §3.3.
    """

    model_type = "fastplm-electra-joint"
    sub_configs = {"generator": AutoConfig, "discriminator": AutoConfig}

    generator: PreTrainedConfig | dict | None = None
    discriminator: PreTrainedConfig | dict | None = None
    discriminator_weight: float | None = None
    temperature: float = 1.0
    sampling_seed: int = 0
    embedding_sharing: str = "embeddings"
    objective: str = "rtd"
    generator_type: str = "model"
    stage: int | None = None
    second_stage_from: str = "generator"
    adversarial: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("generator", "discriminator"):
            value = getattr(self, name)
            if not isinstance(value, PreTrainedConfig):
                kind, *_ = _KINDS[(value or {}).get("model_type", "electra")]
                setattr(self, name, kind(**(value or {})))
        self.check_options()
        if self.discriminator_weight is None:
            self.discriminator_weight = 50.0 if self.detects else 1.0
        super().__post_init__(**kwargs)

    @property
    def detects(self) -> bool:
        """Whether the discriminator detects replaced tokens instead of predicting tokens."""
        return self.objective.startswith("rtd")

    def check_options(self) -> None:
        """Raise an error for unknown options, and for options that cannot be combined."""
        where = "ElectraJointConfig"
        for name, choices in _CHOICES.items():
            check_choice(where, name, getattr(self, name), choices)
        if self.stage not in (None, 1, 2):
            fail(where, "stage", self.stage, "None, 1 or 2", "Choose one.")
        if not self.temperature > 0:
            fail(where, "temperature", self.temperature, "over 0", "Raise it.")
        for option, values, other, wanted in _NEEDS:
            value, got = getattr(self, option), getattr(self, other)
            if value in values and got not in wanted:
                got, expected = f"{got!r} with {option}={value!r}", " or ".join(map(repr, wanted))
                fail(where, other, got, expected, "Leave one of the two out.")
        if self.generator_type == "unigram":
            return
        handed_over = self.stage is not None and self.second_stage_from == "generator"
        equal: tuple[str, ...] = ("vocab_size",)
        if self.embedding_sharing == "all" or handed_over:
            equal = _EMBEDDING_SIZES + _ENCODER_SIZES
        elif self.embedding_sharing == "embeddings":
            equal = _EMBEDDING_SIZES
        elif self.embedding_sharing == "gdes":
            equal = _WORD_SIZES
        for name in equal:
            got, wanted = (_size(part, name) for part in (self.generator, self.discriminator))
            if got != wanted:
                fix = "Derive the generator with ElectraJointConfig.from_discriminator (with "
                fix += "generator_size=1 to share all weights, or to hand them over)."
                expected = f"{wanted}, that of the discriminator"
                fail(where, f"generator.{name}", got, expected, fix)

    @classmethod
    def from_discriminator(
        cls, discriminator: PreTrainedConfig, *, generator_size: float = 0.25, **kwargs: Any
    ) -> ElectraJointConfig:
        """A configuration whose generator is a narrower copy of the discriminator, as in ELECTRA
        (§3.2), or a DeBERTa of fewer layers, as in DeBERTa-v3 (§4).

        Args:
            discriminator: the configuration of the discriminator.
            generator_size: width of the generator as a fraction of the discriminator's, in (0, 1];
                the paper finds 1/4 to 1/2 best. Hidden size and number of heads are scaled; head
                size, depth and embedding size stay the same. Of a DeBERTa: its depth as a fraction.
            kwargs: fields of ``ElectraJointConfig``.

        Raises:
            ArgumentValueError: ``generator_size`` outside (0, 1].
        """
        if not 0 < generator_size <= 1:
            fix = "The paper uses 0.25 (small, large) and 0.333 (base)."
            where, expected = "ElectraJointConfig", "a fraction in (0, 1]"
            fail(where, "generator_size", generator_size, expected, fix)
        if discriminator.model_type != "electra":
            fields = discriminator.to_dict()
            layers = max(1, round(discriminator.num_hidden_layers * generator_size))
            of_generator = {**fields, "num_hidden_layers": layers}
            return cls(generator=of_generator, discriminator=fields, **kwargs)
        head_dim = discriminator.hidden_size // discriminator.num_attention_heads
        heads = max(1, round(discriminator.num_attention_heads * generator_size))
        ratio = discriminator.intermediate_size / discriminator.hidden_size
        width, fields = heads * head_dim, discriminator.to_dict()
        sizes = {"hidden_size": width, "intermediate_size": round(width * ratio)}
        sizes["num_attention_heads"] = heads
        return cls(generator={**fields, **sizes}, discriminator=fields, **kwargs)


def _size(config: Any, name: str) -> Any:
    """A size of a configuration; DeBERTa's has an embedding size only if it is another one."""
    usual = config.hidden_size if name == "embedding_size" else None
    return getattr(config, name, usual)


# So that Transformers' AutoConfig and AutoTokenizer know the checkpoints of a pre-training.
AutoConfig.register(ElectraJointConfig.model_type, ElectraJointConfig, exist_ok=True)


@dataclass
class ElectraJointOutput(ModelOutput):
    """Output of ``ElectraForJointPreTraining``; None for what the objective or stage does not have.

    Args:
        loss: the training loss, 0-d.
        mlm_loss: the MLM loss of the generator, 0-d, detached; in adversarial training it is only
            reported, not minimized.
        generator_loss, baseline_loss: the losses of adversarial training, 0-d, detached.
        rtd_loss, discriminator_mlm_loss: the loss of the discriminator, 0-d, detached; the
            objective says which of the two is set.
        true_positives: int64 0-d, replaced tokens that are predicted as replaced.
        predicted_positives: int64 0-d, tokens predicted as replaced (probability over one half).
        positives: int64 0-d, replaced tokens.
        correct: int64 0-d, correct predictions.
        total: int64 0-d, tokens in the detection loss.
        replaced_ids: int64 [B, T], the discriminator's input, if requested.
    """

    loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    generator_loss: Tensor | None = None
    baseline_loss: Tensor | None = None
    rtd_loss: Tensor | None = None
    discriminator_mlm_loss: Tensor | None = None
    true_positives: Tensor | None = None
    predicted_positives: Tensor | None = None
    positives: Tensor | None = None
    correct: Tensor | None = None
    total: Tensor | None = None
    replaced_ids: Tensor | None = None


class _Reading:
    """A lookup that does more than to read a table, so that no kernel may stand for it."""

    always_reads = True

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, ids: Tensor, *, read: bool = True) -> Tensor:
        return self.function(ids)


class _Slots(NamedTuple):
    """The chosen tokens of a batch, P with unused slots."""

    positions: Tensor  # int64 [P], flat; -1 in unused slots
    targets: Tensor  # int64 [P], the original tokens; -100 in unused slots
    sample_index: Tensor  # int64 [P]
    position: Tensor  # int64 [P], in the sample
    per_label: Tensor | None  # 0-d, the denominator of means over labels; None = of this batch


class _Filled(NamedTuple):
    """The generator's results for these; a unigram generator sets only ``sampled``."""

    sampled: Tensor  # int64 [P], the replacements; -1 in unused slots
    loss: Tensor | None = None  # 0-d
    hidden: Any = None  # [P, E], the last hidden states of the slots
    rows: Any = None  # [P, E], what the head projects to the vocabulary
    weight: Any = None  # [V, E], the weight of that projection


class ElectraForJointPreTraining(FastplmModel, PreTrainedModel):
    """Pre-training by replaced tokens: a generator fills masked tokens, a discriminator detects
    them.

    ``loss = L_MLM(generator) + discriminator_weight * L_Disc(discriminator)``. Each masked token is
    replaced by one sample of the generator's softmax, without a gradient. A sample equal to the
    original token counts as original. If the generator is not trained (a unigram generator, the
    second stage), ``loss = L_Disc``; in the first stage ``loss = L_MLM``. In adversarial training
    ``L_MLM`` is replaced by ``mean_t (R_t - b_t) * -log p_G(x'_t)`` over the masked tokens: the
    reward ``R_t`` is the discriminator's loss at t, and the baseline ``b_t = -log sigmoid(w h_t)``
    is learned by the cross-entropy of ``sigmoid(w h_t)`` with ``exp(-R_t)``.

    ``ElectraJointConfig`` chooses L_Disc, the shared weights and the stage of a two-stage training.
    With stages, DistributedDataParallel needs ``ddp_find_unused_parameters=True``.

    Attributes:
        generator: ``ElectraForMaskedLM`` or ``DebertaV2ForMaskedLM``; None with a unigram
            generator.
        discriminator: ``ElectraForPreTraining`` or ``DebertaV2ForPreTraining``, or the class of
            the generator if the objective is to predict tokens.
        baseline_head: ``nn.Linear`` from a hidden state of the generator to the baseline's logit;
            only for adversarial training.
        copy_head: ``nn.Linear`` from a hidden state to D's logit; only for "all_tokens_mlm".
        token_counts: int64 [V]; only for a unigram generator.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, §3.2, §3.4 and appendix F.
    """

    config_class = ElectraJointConfig
    base_model_prefix = ""
    _takes_rows = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    # One of two classes. Without this, mypy assumes a tensor.
    discriminator: Any
    token_counts: Tensor

    def __init__(self, config: ElectraJointConfig) -> None:
        super().__init__(config)
        chosen: Any = self.config  # both parts get its attention implementation
        chosen.check_options()
        self.generator: Any = None
        if chosen.generator_type == "model":
            self.generator = _KINDS[chosen.generator.model_type][1](chosen.generator)
        else:
            size = chosen.discriminator.vocab_size
            self.register_buffer("token_counts", torch.zeros(size, dtype=torch.int64))
        _, predicts, detects = _KINDS[chosen.discriminator.model_type]
        self.discriminator = (detects if chosen.detects else predicts)(chosen.discriminator)
        if chosen.objective == "all_tokens_mlm":
            self.copy_head = nn.Linear(chosen.discriminator.hidden_size, 1)
        if chosen.adversarial:
            self.baseline_head = nn.Linear(chosen.generator.hidden_size, 1, bias=False)
        self._tied_weights_keys = self._shared_weights()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.generator is None:  # of a checkpoint without counts
            init.zeros_(self.token_counts)
        if module is self and self._adds_embeddings():
            init.zeros_(self.get_input_embeddings().weight)

    def _shared_weights(self) -> dict[str, str]:
        """{generator parameter: the discriminator parameter it is tied to}."""
        if self.generator is None or self.config.embedding_sharing in ("none", "gdes"):
            return {}
        names = [name for name, _ in self.discriminator.base_model.named_parameters()]
        if self.config.embedding_sharing == "embeddings":
            tables = [f"embeddings.{table}.weight" for table in EMBEDDING_TABLES]
            names = [name for name in tables if name in names]
        prefixes = [f"{part}.{getattr(self, part).base_model_prefix}" for part in _PARTS]
        return {f"{prefixes[0]}.{name}": f"{prefixes[1]}.{name}" for name in names}

    def _adds_embeddings(self) -> bool:
        """Whether the discriminator's token embeddings are added to the generator's."""
        return self.generator is not None and self.config.embedding_sharing == "gdes"

    def _added_lookup(self, ids: Tensor) -> Tensor:
        """The discriminator's token embeddings: He et al. 2021, equation 7."""
        below = self.generator.get_input_embeddings().weight.detach()
        return F.embedding(ids, below) + self.get_input_embeddings()(ids)

    # --- parts and checkpoints ---

    def get_input_embeddings(self) -> nn.Module:
        return self.discriminator.get_input_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        for part in (self.generator, self.discriminator):
            if part is not None:
                part.resize_token_embeddings(*args, **kwargs)
        embeddings: Any = self.get_input_embeddings()
        for sizes in (self.config.generator, self.config.discriminator):
            sizes.vocab_size = embeddings.num_embeddings
        if self.generator is None:
            grown = embeddings.num_embeddings - len(self.token_counts)
            self.token_counts = F.pad(self.token_counts, (0, grown))
        self.tie_weights()
        return embeddings

    def whole_discriminator(self) -> Any:
        """The discriminator alone; with "gdes" a copy that has the sum of both token tables."""
        if not self._adds_embeddings():
            return self.discriminator
        whole = copy.deepcopy(self.discriminator)
        with torch.no_grad():
            whole.get_input_embeddings().weight += self.generator.get_input_embeddings().weight
        return whole

    def whole_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """``states`` with the weights of ``whole_discriminator``, where those are not its own.

        Args:
            states: of "discriminator" and "generator" the state dict, where it is not the part's
                own, as of one that is sharded.
        """
        if not self._adds_embeddings():
            return dict(states)
        whole = dict(states.get("discriminator", self.discriminator.state_dict()))
        below = states.get("generator", self.generator.state_dict())
        own, added = (
            [name for name, value in part.state_dict(keep_vars=True).items() if value is table]
            for part in (self.discriminator, self.generator)
            for table in [part.get_input_embeddings().weight]
        )
        # A head may have the same table, under another name.
        whole |= dict.fromkeys(own, whole[own[0]] + below[added[0]])
        return {**states, "discriminator": whole}

    def save_discriminator(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save only the discriminator, for ``transformers.ElectraForPreTraining``, or for
        ``transformers.ElectraForMaskedLM`` if its objective is to predict tokens; a DeBERTa's for
        ``transformers.DebertaV2Model``."""
        self.whole_discriminator().save_pretrained(save_directory, **kwargs)

    def save_generator(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save only the generator, for ``transformers.ElectraForMaskedLM``.

        Raises:
            ArgumentValueError: the generator is a unigram generator.
        """
        if self.generator is None:
            fix = "Save only the discriminator."
            fail(_WHERE, "save_generator", "a unigram generator", "generator_type='model'", fix)
        self.generator.save_pretrained(save_directory, **kwargs)

    def set_token_counts(self, counts: Tensor) -> None:
        """Set the token counts of a unigram generator. Checkpoints contain them.

        They are not smoothed: a token with count 0 is never sampled.

        Args:
            counts: int64 [V], 0 or more, not all 0. Use 0 for tokens that are never chosen for
                prediction ([CLS], [SEP], [MASK], padding).

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong counts, or no unigram generator.
        """
        where = "set_token_counts"
        if self.generator is not None:
            fix = "Only a unigram generator uses token counts."
            fail(where, "generator_type", "'model'", "'unigram'", fix)
        check_tensor(where, "counts", counts)
        check_dtype(where, "counts", counts, (torch.int64,))
        check_shape(where, "counts", counts, self.token_counts.shape, "[V]")
        if (counts < 0).any() or not counts.any():
            got, expected = "a negative count, or only zeros", "counts of 0 or more, not all 0"
            fix = "Count the tokens of the corpus with torch.bincount."
            fail(where, "counts", got, expected, fix)
        self.token_counts.copy_(counts)

    @torch.no_grad()
    def start_second_stage(self) -> None:
        """Start training the discriminator, by default with the generator's weights.

        Copies encoder and embeddings, unless ``config.second_stage_from`` is "scratch"; the
        discriminator's head keeps its initial values. From now on the generator gets no gradient.
        ``config.stage`` stores the stage, so a loaded model continues in it.

        Raises:
            ArgumentValueError: the model is not in the first stage.
        """
        if self.config.stage != 1:
            fix = "Build the model with ElectraJointConfig(stage=1, embedding_sharing='none')."
            fail("start_second_stage", "config.stage", self.config.stage, "1", fix)
        assert self.generator is not None
        if self.config.second_stage_from == "generator":
            self.discriminator.base_model.load_state_dict(self.generator.base_model.state_dict())
        self.zero_grad()
        self.config.stage = 2

    # --- the loss ---

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor = None,  # type: ignore[assignment]
        masked_positions: Tensor | None = None,
        sample_index: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        num_tokens_in_batch: int | Tensor | None = None,
        output_replaced_ids: bool = False,
        unpad: Unpad = None,
        **kwargs: Any,
    ) -> ElectraJointOutput:
        """The losses of a masked batch.

        Args:
            input_ids: int64 [B, T], with masked (or otherwise corrupted) tokens.
            attention_mask: bool or integer [B, T], 1 = token, 0 = padding; labels of padding are
                ignored.
            token_type_ids: int64 [B, T].
            labels: int64 [B, T], the original token at chosen positions, else -100; or, with
                ``masked_positions``, int64 [P], the labels of its slots (as ``ops.mask_tokens``
                returns them).
            masked_positions: as in ``ElectraForMaskedLM``.
            sample_index: int64 [B], the sample indices in the training. The replacements depend
                only on (``config.sampling_seed``, sample index, position) and the generator's
                logits. Default: drawn from torch's generator. Dropout depends on these indices,
                too; without them, on 0 ... B - 1.
            num_items_in_batch: the denominator of losses over labels: the number of labels of all
                batches over which gradients are accumulated. Default: that of this batch.
            num_tokens_in_batch: the same for losses over all tokens. If only
                ``num_items_in_batch`` is given, the mean is multiplied by this batch's share of the
                labels.
            output_replaced_ids: return the discriminator's input.
            unpad: None = leave padding out where possible; False = keep it; an int = a capacity,
                the number of packed rows, which fixes all shapes; a ``RaggedBatch`` = its rows.
            kwargs: passed on to both models.

        Returns:
            ``ElectraJointOutput``. Tokens and labels are counted in one sync on CUDA; with
            ``masked_positions`` and a capacity, or ``unpad=False``, there is none.

        Raises:
            ArgumentValueError, ArgumentTypeError: no labels, wrong shapes, dtypes or (on the CPU)
                ids.
        """
        config, by_label = self.config, self.config.objective in _BY_LABEL
        models = [part for part in (self.generator, self.discriminator) if part is not None]
        check_parts(self, *models, *(model.base_model for model in models))
        check_input_ids(_WHERE, input_ids, config.discriminator.vocab_size)
        counted: dict[str, Any] = {"unpad": unpad}
        seen = _seen(input_ids, attention_mask)
        labels, positions, targets = _labels(
            input_ids, attention_mask, seen, labels, masked_positions, counted
        )
        index, position = _philox_counters(input_ids, positions, sample_index)
        per_label = as_normalizer(num_items_in_batch, input_ids.device)
        slots = _Slots(positions, targets, index, position, per_label)
        rows_of = self.discriminator.base_model._unpadded
        ragged, full = rows_of(attention_mask, None, counted["unpad"])
        kwargs.update(attention_mask=attention_mask, token_type_ids=token_type_ids)
        kwargs.update(return_dict=True, unpad=backbone_unpad(ragged, full, attention_mask))
        if sample_index is not None:
            kwargs["sample_index"] = sample_index

        filled = self._fill(input_ids, slots, kwargs)
        mlm_loss = None if filled.loss is None else filled.loss.detach()
        if config.stage == 1:
            return ElectraJointOutput(loss=filled.loss, mlm_loss=mlm_loss)

        originals = torch.where(labels == IGNORE_INDEX, input_ids, labels)
        replaced_ids = ids = _write(originals, slots.positions, filled.sampled)
        output_rows = slots.positions if by_label else None
        if self._adds_embeddings():
            kwargs["lookup"] = _Reading(self._added_lookup)
        rows = self.discriminator.base_model(replaced_ids, output_rows=output_rows, **kwargs)
        rows = rows.last_hidden_state.flatten(0, 1)
        if by_label:
            loss, metrics = self._judge(rows, filled.sampled, slots.targets, None, slots.per_label)
        else:
            per_token = _per_token(num_tokens_in_batch, num_items_in_batch, labels, seen)
            if ragged is not None:
                ids, originals = ragged.pack(ids), ragged.pack(originals)
                seen = ragged.positions >= 0 if ragged.key_mask is None else ragged.key_mask
            ids, originals, seen = (one.flatten() for one in (ids, originals, seen))
            loss, metrics = self._judge(rows, ids, originals, seen, per_token)
        if config.adversarial:
            if not by_label:  # in a packed batch, ``slots()`` says in which row a position is
                packed = None if ragged is None else ragged.slots()
                rows = rows_at(rows, slots.positions, packed)[:, 0]
            generator_loss, baseline_loss = self._reinforce(filled, rows, slots)
            metrics |= {
                "generator_loss": generator_loss.detach(),
                "baseline_loss": baseline_loss.detach(),
            }
            loss = generator_loss + baseline_loss + config.discriminator_weight * loss
        elif filled.loss is not None and config.stage is None:
            loss = filled.loss + config.discriminator_weight * loss
        return ElectraJointOutput(
            loss=loss,
            mlm_loss=mlm_loss,
            replaced_ids=replaced_ids if output_replaced_ids else None,
            **metrics,
        )

    def _vocabulary(self, part: Any) -> Any:
        """The projection to the vocabulary. Only its weight and bias are used."""
        _, decoder = part._head()
        if not is_plain(decoder, nn.Linear, Linear):
            got = f"a {type(decoder).__name__} with a forward, a hook or an adapter of its own"
            expected = "a linear layer: the loss reads its weight and its bias, and never calls it"
            fix = "Remove the hook, or merge the adapter into the weight."
            fail(_WHERE, "generator_lm_head", got, expected, fix, UnsupportedError)
        return decoder

    def _fill(self, input_ids: Tensor, slots: _Slots, arguments: dict[str, Any]) -> _Filled:
        """The generator's loss and one sample of its softmax for each slot, in one pass: §2."""
        config, generator = self.config, self.generator
        if generator is None:
            return _Filled(self._draw_by_frequency(slots))
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.stage != 2):
            decoder = self._vocabulary(generator)
            lookup = TiedLookup(decoder)
            looked_up = partial(lookup, generator.get_input_embeddings())
            hidden = generator.base_model(
                input_ids, output_rows=slots.positions, lookup=looked_up, **arguments
            ).last_hidden_state[:, 0]
            rows = generator._head()[0](hidden)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not config.adversarial):
                loss, sampled = ops.linear_cross_entropy_with_sample(
                    rows,
                    lookup.weight,
                    slots.targets,
                    linear_bias=decoder.bias,
                    normalizer=slots.per_label,
                    expected_targets=rows.shape[0],
                    temperature=config.temperature,
                    seed=config.sampling_seed,
                    sample_index=slots.sample_index,
                    position=slots.position,
                )
        return _Filled(sampled, loss, hidden, rows, lookup.weight)

    def _reinforce(self, filled: _Filled, judged: Tensor, slots: _Slots) -> tuple[Tensor, Tensor]:
        """The losses of the generator and of its baseline: appendix F.

        The reward is the discriminator's loss at each slot, of its hidden states ``judged`` [P, E].
        The generator gets no gradient from the baseline, nor from the discriminator.
        """
        used = slots.targets != IGNORE_INDEX
        with torch.no_grad():
            scores = in_fp32(self.discriminator.logits(self.discriminator.features(judged)))
            replaced = (filled.sampled != slots.targets).to(scores.dtype)
            rewards = F.binary_cross_entropy_with_logits(scores, replaced, reduction="none")
        decoder = self._vocabulary(self.generator)
        hotter = 1 / self.config.temperature
        nll = ops.linear_cross_entropy(
            filled.rows * hotter,
            filled.weight,
            filled.sampled.masked_fill(~used, IGNORE_INDEX),
            linear_bias=decoder.bias * hotter,
            reduction="none",
            expected_targets=filled.rows.shape[0],
        )
        logits = in_fp32(self.baseline_head(filled.hidden.detach()).squeeze(-1))
        advantages = rewards - F.softplus(-logits.detach())
        matched = F.binary_cross_entropy_with_logits(logits, (-rewards).exp(), reduction="none")

        def mean(values: Tensor) -> Tensor:
            return reduce_loss(values.masked_fill(~used, 0.0), used, "mean", slots.per_label)

        return mean(advantages * nll), mean(matched)

    def _draw_by_frequency(self, slots: _Slots) -> Tensor:
        """One token for each slot, sampled by its frequency: the unigram generator of §3.2.

        The token is the first whose cumulative count exceeds ``floor(u * total)``, where u is the
        same uniform number that a generator network would use. The counts are integers, so every
        device samples the same tokens.
        """
        seed, index, position = self.config.sampling_seed, slots.sample_index, slots.position
        word, *_ = draw(seed, Stream.SAMPLE, sample_index=index, position=position)
        if values_are_known(self.token_counts) and not self.token_counts.any():
            expected = "the frequencies of the tokens in the corpus"
            fail(_WHERE, "token_counts", "no counts", expected, "Call set_token_counts first.")
        reached = self.token_counts.cumsum(0)
        level = (uniform(word) * reached[-1]).long()
        drawn = torch.searchsorted(reached, level, right=True)
        return drawn.masked_fill(slots.targets == IGNORE_INDEX, -1)

    def _judge(
        self,
        rows: Tensor,
        ids: Tensor,
        originals: Tensor,
        seen: Tensor | None,
        normalizer: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the discriminator's loss, fields of the output), of all tokens or of the slots: §3.4.

        Args:
            rows: the last hidden states [N, E], or [P, E] of the slots.
            ids, originals: what the discriminator gets, and the tokens before; -100 = no label.
            seen: bool [N], which tokens count; None = those with a label.
            normalizer: the denominator of the mean.
        """
        if self.config.detects:
            loss, counts = rtd_loss(
                self.discriminator.features(rows),
                (ids, originals),
                self.discriminator.prediction(),
                originals != IGNORE_INDEX if seen is None else seen,
                normalizer=normalizer,
                return_counts=True,
                where=_WHERE,
            )
            return loss, {"rtd_loss": loss.detach(), **counts._asdict()}
        if seen is None:
            loss = self._predict(rows, originals, normalizer=normalizer)
        else:
            labels = originals.masked_fill(~seen, IGNORE_INDEX)
            losses = self._copied_or_predicted(rows, ids, labels)
            loss = reduce_loss(losses, seen, "mean", normalizer)
        return loss, {"discriminator_mlm_loss": loss.detach()}

    def _predict(self, rows: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """The cross-entropy of the discriminator's MLM head."""
        decoder = self._vocabulary(self.discriminator)
        return ops.linear_cross_entropy(
            self.discriminator._head()[0](rows),
            decoder.weight,
            targets,
            linear_bias=decoder.bias,
            expected_targets=rows.shape[0],
            **options,
        )

    def _copied_or_predicted(self, rows: Tensor, ids: Tensor, originals: Tensor) -> Tensor:
        """The loss of each original token, copied or predicted, [N], 0 where it is -100: §3.4.

        ``-log(D 1[x = x'] + (1 - D) softmax(x))``, computed with logarithms, so that no
        probability underflows.
        """
        nll = self._predict(rows, originals, reduction="none")
        copy = self.copy_head(rows).squeeze(-1).to(nll.dtype)
        predicted = F.logsigmoid(-copy) - nll
        either = torch.logaddexp(F.logsigmoid(copy), predicted)
        losses = torch.where(ids == originals, either, predicted).neg()
        return losses.masked_fill(originals == IGNORE_INDEX, 0.0)


# Arguments by position come in the order of the discriminator's.
fitted(ElectraForJointPreTraining, ElectraForPreTraining)


def _per_token(
    num_tokens: int | Tensor | None, num_items: int | Tensor | None, labels: Tensor, seen: Tensor
) -> Tensor | None:
    """The denominator of a mean over tokens.

    It is ``num_tokens`` if that is given. With ``num_items`` alone it gives the mean over this
    batch, times this batch's share of the labels. With neither it is None: the tokens of this
    batch.
    """
    if num_tokens is not None or num_items is None:
        return as_normalizer(num_tokens, labels.device)
    # Without labels the share is 0, the denominator infinite and the loss 0.
    return seen.sum().clamp(min=1) / batch_share(labels, num_items)


def _seen(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The tokens that are not padding: bool [B, T]."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    check_tensor(_WHERE, "attention_mask", attention_mask)
    check_shape(_WHERE, "attention_mask", attention_mask, input_ids.shape, "[B, T]")
    return attention_mask.bool()


def _labels(
    input_ids: Tensor,
    mask: Tensor | None,
    seen: Tensor,
    labels: Tensor,
    masked_positions: Tensor | None,
    counted: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """(labels int64 [B, T] with -100 in padding, their positions [P], their values [P]).

    ``counted`` are the ``inputs`` of ``slots_of_labels``.
    """
    check_tensor(_WHERE, "labels", labels)
    if masked_positions is not None and labels.dim() == 1:
        check_tensor(_WHERE, "masked_positions", masked_positions, ndim=1)
        check_shape(_WHERE, "labels", labels, masked_positions.shape, "[P] or [B, T]")
        nothing = torch.full_like(input_ids, IGNORE_INDEX)
        labels = _write(nothing, masked_positions, labels)
    check_dtype(_WHERE, "labels", labels, INTEGER)
    fix = "Use -100 where there is none."
    check_shape(_WHERE, "labels", labels, input_ids.shape, "one label a token", fix)
    labels = labels.long().masked_fill(~seen, IGNORE_INDEX)
    count = None
    if masked_positions is None:
        count = slots_of_labels(labels, counted, lambda labelled: {"unpad": (mask, None)})
    return labels, *labels_at(
        _WHERE, labels, labels.shape, masked_positions, exact=False, slots=count
    )


def _philox_counters(
    input_ids: Tensor, positions: Tensor, sample_index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sample index and the position in the sample of each slot, both int64 [P]."""
    batch, length = input_ids.shape
    if sample_index is None:
        sample_index = torch.randint(1 << 62, (batch,), device=input_ids.device)
    check_tensor(_WHERE, "sample_index", sample_index, ndim=1)
    check_dtype(_WHERE, "sample_index", sample_index, (torch.int64,))
    check_shape(_WHERE, "sample_index", sample_index, (batch,), "[B]")
    used = positions.clamp(min=0)
    return sample_index[used // length], used % length


def _write(ids: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """``ids`` [B, T] with ``values`` [P] at flat ``positions`` [P]; negative ones are skipped."""
    # Skipped values go to an additional element at the end.
    flat = torch.cat((ids.flatten(), ids.new_zeros(1)))
    slots = positions.masked_fill((positions < 0) | (values < 0), ids.numel())
    return flat.scatter(0, slots, values.to(ids.dtype))[:-1].view_as(ids)
