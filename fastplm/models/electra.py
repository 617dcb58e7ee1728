"""ELECTRA: drop-in heads, and the joint pre-training of generator and discriminator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import ElectraConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput, ModelOutput
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm import ops
from fastplm._checks import check, check_dtype, check_shape, check_tensor
from fastplm.models._base import FastplmModel, check_input_ids
from fastplm.nn._rows import IGNORE_INDEX, as_normalizer, batch_share, gather_labelled
from fastplm.nn.mlm_head import mlm_loss
from fastplm.nn.rtd_head import rtd_loss
from fastplm.reference.philox import Stream, draw, uniform

# Probabilities held at once while replacements are drawn; bounds the memory, never the result.
_SAMPLE_ELEMENTS = 1 << 22


class ElectraForMaskedLM(FastplmModel, transformers.ElectraForMaskedLM):
    """``transformers.ElectraForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the generator.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """As the parent; ``labels``, ``masked_positions``, ``output_logits`` and
        ``num_items_in_batch`` are those of ``fastplm.models.BertForMaskedLM``."""
        check_input_ids("ElectraForMaskedLM", input_ids, self.config.vocab_size)
        outputs = self.electra(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            loss = mlm_loss(
                hidden,
                labels,
                self.generator_predictions,
                self.generator_lm_head,
                masked_positions,
                normalizer=num_items_in_batch,
                where="ElectraForMaskedLM",
            )
        if labels is None or output_logits:
            logits = self.generator_lm_head(self.generator_predictions(hidden))
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ElectraForPreTraining(FastplmModel, transformers.ElectraForPreTraining):
    """``transformers.ElectraForPreTraining`` with the fused replaced-token loss.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the discriminator.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> ElectraForPreTrainingOutput:
        """As the parent, with these differences.

        Args:
            labels: integer or bool [B, T], 1 = replaced, 0 = original, -100 = left out of the loss,
                as is everything that ``attention_mask`` hides. With labels, ``logits`` are None.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of tokens that
                count in all batches that gradients are accumulated over. Trainer counts the labels
                that are not -100, so padding must be labelled -100 there.

        Returns:
            ``ElectraForPreTrainingOutput``; the loss is fp32, and 0 if no token counts.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        check_input_ids("ElectraForPreTraining", input_ids, self.config.vocab_size)
        outputs = self.electra(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        features = self.features(outputs.last_hidden_state)
        loss = logits = None
        if labels is not None:
            check_tensor("ElectraForPreTraining", "labels", labels)
            counted = labels != IGNORE_INDEX
            if attention_mask is not None:
                check_shape(
                    "ElectraForPreTraining", "labels", labels, attention_mask.shape, "[B, T]"
                )
                counted = counted & attention_mask.bool()
            loss = rtd_loss(
                features,
                labels,
                self.discriminator_predictions.dense_prediction,
                counted,
                normalizer=num_items_in_batch,
                where="ElectraForPreTraining",
            )
        if labels is None or output_logits:
            logits = self.logits(features)
        return ElectraForPreTrainingOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def features(self, hidden: Tensor) -> Tensor:
        """What the last linear layer of the head sees: [..., E] -> [..., E]."""
        head = self.discriminator_predictions
        return head.activation(head.dense(hidden))

    def logits(self, features: Tensor) -> Tensor:
        """The score of "replaced" for each token: [..., E] -> [...]."""
        return self.discriminator_predictions.dense_prediction(features).squeeze(-1)


class ElectraJointConfig(PreTrainedConfig):
    """Configuration of ``ElectraForJointPreTraining``: two ELECTRAs and the objective.

    Args:
        generator, discriminator: ``ElectraConfig`` (or its dict); equal in vocabulary, embedding
            size, positions and token types, as those embeddings are tied.
        discriminator_weight: lambda, the factor of the discriminator's loss.
        temperature: of the softmax that replacements are drawn from.
        sampling_seed: of the replacements.

    ``ElectraJointConfig.from_discriminator`` derives the generator.
    """

    model_type = "fastplm-electra-joint"
    sub_configs = {"generator": ElectraConfig, "discriminator": ElectraConfig}

    generator: ElectraConfig | dict | None = None
    discriminator: ElectraConfig | dict | None = None
    discriminator_weight: float = 50.0
    temperature: float = 1.0
    sampling_seed: int = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("generator", "discriminator"):
            value = getattr(self, name)
            if not isinstance(value, PreTrainedConfig):
                setattr(self, name, ElectraConfig(**(value or {})))
        super().__post_init__(**kwargs)

    @classmethod
    def from_discriminator(
        cls, discriminator: ElectraConfig, *, generator_size: float = 0.25, **kwargs: Any
    ) -> ElectraJointConfig:
        """The generator is the discriminator, narrower: ELECTRA §3.2.

        Args:
            discriminator: its configuration.
            generator_size: width of the generator as a fraction of the discriminator's, in (0, 1];
                the paper finds 1/4 to 1/2 best. Hidden size and heads shrink together, so that the
                size of a head stays; depth and embedding size stay.
            kwargs: fields of ``ElectraJointConfig``.

        Raises:
            ArgumentValueError: ``generator_size`` outside (0, 1].
        """
        check(
            0 < generator_size <= 1,
            "ElectraJointConfig",
            "generator_size",
            generator_size,
            "a fraction in (0, 1]",
            "The paper uses 0.25 (small, large) and 0.333 (base).",
        )
        head_dim = discriminator.hidden_size // discriminator.num_attention_heads
        heads = max(1, round(discriminator.num_attention_heads * generator_size))
        ratio = discriminator.intermediate_size / discriminator.hidden_size
        fields = discriminator.to_dict()
        fields.update(
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            intermediate_size=round(heads * head_dim * ratio),
        )
        return cls(
            generator=ElectraConfig(**fields),
            discriminator=ElectraConfig(**discriminator.to_dict()),
            **kwargs,
        )


@dataclass
class ElectraJointOutput(ModelOutput):
    """Output of ``ElectraForJointPreTraining``.

    Args:
        loss: ``mlm_loss + discriminator_weight * rtd_loss``, 0-d.
        mlm_loss, rtd_loss: the generator's and the discriminator's, 0-d, detached.
        true_positives: int64 0-d, tokens that are replaced and taken for replaced.
        predicted_positives: int64 0-d, tokens taken for replaced (probability over one half).
        positives: int64 0-d, tokens that are replaced.
        correct: int64 0-d, tokens judged rightly.
        total: int64 0-d, tokens judged: those that ``attention_mask`` shows.
        replaced_ids: int64 [B, T], what the discriminator saw, if asked for.
    """

    loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    rtd_loss: Tensor | None = None
    true_positives: Tensor | None = None
    predicted_positives: Tensor | None = None
    positives: Tensor | None = None
    correct: Tensor | None = None
    total: Tensor | None = None
    replaced_ids: Tensor | None = None


class ElectraForJointPreTraining(FastplmModel, PreTrainedModel):
    """ELECTRA's pre-training: a generator fills masked tokens, a discriminator finds the fillings.

    ``loss = L_MLM(generator) + discriminator_weight * L_Disc(discriminator)``, where a masked token
    is replaced by one draw from the generator's softmax, through which no gradient flows, and where
    a draw that equals the original token counts as original.

    The token, position and token-type embeddings of the two are one, of the discriminator's
    embedding size.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2 and §3.2.
    """

    config_class = ElectraJointConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _tied_weights_keys = {
        f"generator.electra.embeddings.{table}.weight": (
            f"discriminator.electra.embeddings.{table}.weight"
        )
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings")
    }

    def __init__(self, config: ElectraJointConfig) -> None:
        super().__init__(config)
        generator, discriminator = self.config.generator, self.config.discriminator
        for name in ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size"):
            wanted = getattr(discriminator, name)
            check(
                getattr(generator, name) == wanted,
                "ElectraForJointPreTraining",
                f"generator.{name}",
                getattr(generator, name),
                f"{wanted}, that of the discriminator, as the embeddings are tied",
                "Derive the generator with ElectraJointConfig.from_discriminator.",
            )
        self.generator = ElectraForMaskedLM(generator)
        self.discriminator = ElectraForPreTraining(discriminator)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.discriminator.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.generator.set_input_embeddings(value)
        self.discriminator.set_input_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        for part in (self.config.generator, self.config.discriminator):
            part.vocab_size = embeddings.num_embeddings
        return embeddings

    def save_discriminator(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write the discriminator alone, as ``transformers.ElectraForPreTraining`` loads it."""
        self.discriminator.save_pretrained(save_directory, **kwargs)

    def save_generator(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write the generator alone, as ``transformers.ElectraForMaskedLM`` loads it."""
        self.generator.save_pretrained(save_directory, **kwargs)

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
        **kwargs: Any,
    ) -> ElectraJointOutput:
        """Both losses of a masked batch.

        Args:
            input_ids: int64 [B, T], with masked (or otherwise corrupted) tokens.
            attention_mask: bool or integer [B, T], 1 = token, 0 = padding.
            token_type_ids: int64 [B, T].
            labels: int64 [B, T], the original token where it was chosen for prediction, else -100.
            masked_positions: int64 [P], flat positions of the labels, -1 in unused slots; fixes the
                shapes of the head, for compiled models and CUDA. Without it they are found.
            sample_index: int64 [B], the samples' places in the training stream. The replacements
                are a pure function of (``config.sampling_seed``, sample index, position) and of the
                generator's logits. Without it, one is drawn from torch's generator.
            num_items_in_batch: what the sum of the generator's losses is divided by: the number of
                labels of all batches that gradients are accumulated over. Default: of this batch.
            num_tokens_in_batch: likewise for the discriminator, in tokens. Without it, but with
                ``num_items_in_batch``, the mean is weighted by this batch's share of the labels.
            output_replaced_ids: return what the discriminator saw.
            kwargs: passed on to both models.

        Returns:
            ``ElectraJointOutput``. Nothing in it was copied to the host.

        Raises:
            ArgumentValueError, ArgumentTypeError: no labels, or shapes, dtypes or (on the CPU) ids
                that do not fit.
        """
        where = "ElectraForJointPreTraining"
        check_tensor(where, "labels", labels)
        check_input_ids(where, input_ids, self.config.discriminator.vocab_size)
        common = {
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "return_dict": True,
            **kwargs,
        }
        hidden = self.generator.electra(input_ids, **common).last_hidden_state
        rows, targets, positions = gather_labelled(where, hidden, labels, masked_positions)
        rows = self.generator.generator_predictions(rows)
        decoder = self.generator.generator_lm_head
        mlm_loss = ops.linear_cross_entropy(
            rows,
            decoder.weight,
            targets,
            linear_bias=decoder.bias,
            normalizer=as_normalizer(num_items_in_batch, rows.device),
        )

        originals = torch.where(labels == IGNORE_INDEX, input_ids, labels)
        sampled = self._sample(rows, decoder, positions, input_ids, sample_index)
        replaced_ids = _write(originals, positions, sampled)
        replaced = replaced_ids != originals
        judged = torch.ones_like(replaced) if attention_mask is None else attention_mask.bool()

        hidden = self.discriminator.electra(replaced_ids, **common).last_hidden_state
        features = self.discriminator.features(hidden)
        prediction = self.discriminator.discriminator_predictions.dense_prediction
        disc_loss = rtd_loss(
            features, replaced, prediction, judged, normalizer=num_tokens_in_batch, where=where
        )
        if num_tokens_in_batch is None:
            disc_loss = disc_loss * batch_share(labels, num_items_in_batch)

        with torch.no_grad():
            flagged = (self.discriminator.logits(features) > 0) & judged
        replaced = replaced & judged
        return ElectraJointOutput(
            loss=mlm_loss + self.config.discriminator_weight * disc_loss,
            mlm_loss=mlm_loss.detach(),
            rtd_loss=disc_loss.detach(),
            true_positives=(flagged & replaced).sum(),
            predicted_positives=flagged.sum(),
            positives=replaced.sum(),
            correct=((flagged == replaced) & judged).sum(),
            total=judged.sum(),
            replaced_ids=replaced_ids if output_replaced_ids else None,
        )

    @torch.no_grad()
    def _sample(
        self,
        rows: Tensor,
        decoder: nn.Linear,
        positions: Tensor,
        input_ids: Tensor,
        sample_index: Tensor | None,
    ) -> Tensor:
        """One token for each slot, by its own uniform number: int64 [P]."""
        batch, length = input_ids.shape
        if sample_index is None:
            sample_index = torch.randint(1 << 62, (batch,), device=input_ids.device)
        check_tensor("ElectraForJointPreTraining", "sample_index", sample_index, ndim=1)
        check_dtype("ElectraForJointPreTraining", "sample_index", sample_index, (torch.int64,))
        check_shape("ElectraForJointPreTraining", "sample_index", sample_index, (batch,), "[B]")
        used = positions.clamp(min=0)
        word, *_ = draw(
            self.config.sampling_seed,
            Stream.SAMPLE,
            sample_index=sample_index[used // length],
            position=used % length,
        )
        return _inverse_cdf(rows, decoder, self.config.temperature, uniform(word))


def _inverse_cdf(rows: Tensor, decoder: nn.Linear, temperature: float, level: Tensor) -> Tensor:
    """The token at which the distribution function of softmax(logits / temperature) passes a level.

    Args:
        rows: [P, E].
        decoder: ``nn.Linear(E, V)``.
        temperature: over 0.
        level: fp64 [P] in (0, 1).

    Returns:
        int64 [P].
    """
    tokens = []
    size = max(1, _SAMPLE_ELEMENTS // decoder.out_features)
    for some_rows, some_levels in zip(rows.split(size), level.split(size), strict=True):
        logits = decoder(some_rows).float() / temperature
        # fp64: in fp32 the sum over a vocabulary would favour or starve the tokens at its end.
        distribution = logits.softmax(-1).double().cumsum(-1)  # [size, V]
        threshold = some_levels[:, None] * distribution[:, -1:]
        # The first token at or above a threshold over 0: never one of probability 0.
        tokens.append(torch.searchsorted(distribution, threshold).squeeze(1))
    return torch.cat(tokens)


def _write(ids: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """``ids`` [B, T] with ``values`` [P] at flat ``positions`` [P]; -1 writes nowhere."""
    # A spare entry at the end takes what belongs nowhere: index -1.
    flat = torch.cat((ids.flatten(), ids.new_zeros(1)))
    slots = torch.where(positions < 0, ids.numel(), positions)
    return flat.scatter(0, slots, values.to(ids.dtype))[:-1].view_as(ids)
