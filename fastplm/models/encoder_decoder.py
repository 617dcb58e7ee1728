"""Warm-started encoder-decoders such as BERT2BERT, drop-in for ``EncoderDecoderModel``.

Any drop-in encoder (BERT, RoBERTa, ALBERT, ELECTRA) with any drop-in decoder (BERT, RoBERTa,
ELECTRA, GPT-2):

    source -> unpad once -> encoder ---- packed states ----.
    target -> unpad once -> decoder, cross-attention over them -> loss at the labelled tokens
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

import transformers
from torch import Tensor
from transformers import EncoderDecoderConfig, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from fastplm._modes import values_can_be_read
from fastplm.errors import fail
from fastplm.hf import IS_CHOSEN, NAME, attention_of
from fastplm.models._base import (
    CACHE,
    FastplmModel,
    choosing,
    own_configs,
    set_attention,
    share_config,
    unpad_of,
    wants_output,
)
from fastplm.models._encoder import EncoderModel
from fastplm.models._heads import shape_of, wants_logits
from fastplm.models._ragged import Unpad, until_last
from fastplm.models._seq2seq import both_sides, encoded, source_mask
from fastplm.nn._rows import IGNORE_INDEX, batch_share

_PARTS = ("encoder", "decoder")
_RECORDED = ("output_hidden_states", "output_attentions")
_FAMILIES = ("albert", "bert", "electra", "gpt2", "roberta")


class EncoderDecoderModel(FastplmModel, transformers.EncoderDecoderModel):
    """``transformers.EncoderDecoderModel`` of drop-in parts, both without padding.

    A warm start loads both parts from encoder checkpoints::

        model = EncoderDecoderModel.from_encoder_decoder_pretrained(
            "bert-base-uncased", "bert-base-uncased", tie_encoder_decoder=True
        )

    As in the parent class, the decoder's self-attention is causal with the encoder's weights, its
    cross-attention is newly initialized, and its vocabulary projection is tied to its word
    embeddings. To initialize one part newly, pass a model instead of its checkpoint, such as
    ``decoder_model=BertLMHeadModel(config)``.

    With ``config.tie_encoder_decoder`` (of Transformers 4; Transformers 5 ignores it) the decoder's
    backbone and the encoder share all weights except cross-attention. Both must have the same
    family and sizes. ``save_pretrained`` stores a shared weight for both parts, so Transformers can
    load the checkpoint too; with ``shared_once=True``, it stores it once.

    The classes of parts that are given as models are replaced in place, and their attention
    implementation becomes "fastplm", in copies of their configurations.

    Args:
        config: as in the parent; may have ``tie_encoder_decoder``.
        encoder, decoder: as in the parent.

    Raises:
        ArgumentValueError: ``tie_encoder_decoder`` with parts whose weights differ in name or
            shape.

    Source: Rothe et al. 2020 (arXiv 1907.12461), §2: BERT2BERT, BERTSHARE, BERT2GPT, RND2BERT, …
    """

    def __init__(
        self,
        config: EncoderDecoderConfig | None = None,
        encoder: PreTrainedModel | None = None,
        decoder: PreTrainedModel | None = None,
    ) -> None:
        if config is None and encoder is not None and decoder is not None:
            config = EncoderDecoderConfig.from_encoder_decoder_configs(
                encoder.config, decoder.config
            )
        if not isinstance(config, EncoderDecoderConfig):
            expected = "an EncoderDecoderConfig, or both an encoder and a decoder"
            fix = "See EncoderDecoderConfig.from_encoder_decoder_configs."
            fail(type(self).__name__, "config", f"a {type(config).__name__}", expected, fix)
        for name in _PARTS:
            if getattr(config, name).model_type in _FAMILIES:
                importlib.import_module(f"fastplm.models.{getattr(config, name).model_type}")
        super().__init__(config, encoder, decoder)
        chosen = IS_CHOSEN.get()
        if not chosen:
            own_configs(self)
        for part in (self.encoder, self.decoder):
            share_config(part, part.config)
            for model in part.modules():
                if not isinstance(model, PreTrainedModel):
                    continue
                if attention_of(type(model)) == "own":
                    set_attention(model, "eager")
                elif not (chosen or model.config.output_attentions):
                    # A part that was made before has the choice of then.
                    set_attention(model, NAME)

    @classmethod
    def from_encoder_decoder_pretrained(
        cls,
        encoder_pretrained_model_name_or_path: str | None = None,
        decoder_pretrained_model_name_or_path: str | None = None,
        *model_args: Any,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Like the parent, with fused attention. ``attn_implementation`` applies to both parts,
        ``encoder_attn_implementation`` and ``decoder_attn_implementation`` to one."""
        chosen = kwargs.pop("attn_implementation", None)
        asked = [kwargs.get(f"{name}_attn_implementation", chosen) for name in _PARTS]
        if asked != [None, None]:
            for name, wish in zip(_PARTS, asked, strict=True):
                kwargs[f"{name}_attn_implementation"] = wish or NAME
        with choosing(next((wish for wish in asked if wish not in (None, NAME)), None), cls):
            return super().from_encoder_decoder_pretrained(
                encoder_pretrained_model_name_or_path,
                decoder_pretrained_model_name_or_path,
                *model_args,
                **kwargs,
            )

    # --- shared weights ---

    def post_init(self) -> None:
        if getattr(self.config, "tie_encoder_decoder", False):
            self._tied_weights_keys = self._shared_weights()
        super().post_init()

    def _shared_weights(self) -> dict[str, str]:
        """{decoder parameter: the encoder parameter it is tied to}."""
        encoder: Any = self.encoder
        decoder: Any = self.decoder
        one, other = (part.config.model_type for part in (encoder, decoder))
        names = {}
        shapes = {name: tuple(weight.shape) for name, weight in encoder.named_parameters()}
        for name, weight in decoder.base_model.named_parameters():
            if ".crossattention." in name:
                continue
            if one != other or shapes.get(name) != tuple(weight.shape):
                got = f"True for a {one} encoder and a {other} decoder whose {name!r} are "
                got += f"{shapes.get(name, 'missing')} and {tuple(weight.shape)}"
                fix = "Use the same checkpoint for both, or leave tie_encoder_decoder out."
                expected = "two parts of one family and of equal sizes"
                fail(type(self).__name__, "tie_encoder_decoder", got, expected, fix)
            names[f"decoder.{decoder.base_model_prefix}.{name}"] = f"encoder.{name}"
        return names

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict:
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        # The parent would check ``config.tie_word_embeddings``, which concerns only the decoder.
        return dict(self._tied_weights_keys or {})

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        shared_once: bool = False,
        **kwargs: Any,
    ) -> None:
        """Like the parent, with one additional argument.

        Args:
            shared_once: store a shared weight once. Transformers' class, which does not support
                sharing, then initializes the decoder's weight newly.
        """
        if self._tied_weights_keys and not shared_once:
            state_dict = dict(self.state_dict() if state_dict is None else state_dict)
            for name in self._tied_weights_keys:
                if name in state_dict:
                    state_dict[name] = state_dict[name].clone()
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)

    # --- forward ---

    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        loss_positions: Tensor | None = None,
        use_cache: bool | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        unpad: Unpad = None,
        decoder_unpad: Unpad = None,
        **inputs: Any,
    ) -> Seq2SeqLMOutput:
        """Like the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none; label t is predicted at ``decoder_input_ids[:, t]``,
                by default the labels shifted by one. With labels, the loss is fp32, and the cache
                is None unless ``use_cache`` is True. Without a cache, logits, hidden states and
                attentions, ``encoder_last_hidden_state`` is None too, and the decoder computes no
                rows after the last label of a sequence.
            loss_positions: int64 [P], flat positions of the labels, -1 in unused slots; fixes the
                shapes of the head. Default: computed from ``labels``.
            output_logits, num_items_in_batch: as in ``…ForMaskedLM``.
            reduction: "none" = the loss of each label, as of the decoder.
            unpad, decoder_unpad: what to do with the padding of encoder and decoder. None = leave
                it out where possible; False = keep it; an int = a capacity, the number of packed
                rows, which fixes all shapes.
            inputs: arguments of the encoder, or with the prefix ``decoder_`` those of the decoder.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        encoder: Any = self.encoder
        decoder: Any = self.decoder
        ours = isinstance(encoder, EncoderModel), isinstance(decoder, FastplmModel)
        attention_mask = inputs["attention_mask"] = source_mask(**inputs)
        if attention_mask is not None and attention_mask.dim() != 2:
            # Cross-attention uses this mask too, and would be packed like the decoder.
            decoder_unpad = False
        if ours[1]:
            inputs["decoder_unpad"] = decoder_unpad
        if labels is None or not ours[1]:
            inputs.update(labels=labels, use_cache=use_cache)
            if ours[0]:
                inputs["unpad"] = unpad
            return self._by_parent(inputs, num_items_in_batch, reduction)

        encoder_outputs = inputs.pop("encoder_outputs", None)
        past_key_values = inputs.pop(CACHE, None)
        to_encoder = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
        del to_encoder["attention_mask"]
        to_decoder = {
            key.removeprefix("decoder_"): value
            for key, value in inputs.items()
            if key.startswith("decoder_") or key in (*_RECORDED, "sample_index")
        }
        recorded = any(
            wants_output(part, name, given)
            for name in _RECORDED
            for part, given in ((encoder, to_encoder), (decoder, to_decoder))
        )
        unpad = unpad_of(encoder, unpad, to_encoder)
        output_logits = wants_logits(self, output_logits, labels)
        loss_only = not (output_logits or recorded or use_cache or past_key_values is not None)
        fused = all(part.config._attn_implementation == NAME for part in (encoder, decoder))

        # --- encoder ---
        packs = ours[0] and fused and attention_mask is not None and attention_mask.dim() == 2
        to_encoder.update(packs=packs, show=not loss_only, return_dict=True)
        given = encoder, encoder_outputs, attention_mask, unpad
        encoder_outputs, states, rows = encoded(*given, **to_encoder)
        if (projection := getattr(self, "enc_to_dec_proj", None)) is not None:
            states = projection(states)

        # --- decoder and loss ---
        if shape_of(to_decoder) is None:
            to_decoder["input_ids"] = ids = self.prepare_decoder_input_ids_from_labels(labels)
            if to_decoder.get("attention_mask") is None:
                to_decoder["attention_mask"] = ids != self.config.pad_token_id
        if fused and loss_only:
            mask = _until_last_label(labels, to_decoder.get("attention_mask"), decoder_unpad)
            to_decoder["attention_mask"] = mask
        if rows is not None:
            to_decoder["encoder_rows"] = rows
        outputs = decoder(
            encoder_hidden_states=states,
            encoder_attention_mask=attention_mask,
            use_cache=bool(use_cache),
            shift_labels=labels,
            loss_positions=loss_positions,
            num_items_in_batch=num_items_in_batch,
            reduction=reduction,
            output_logits=output_logits,
            return_dict=True,
            **{CACHE: past_key_values, **to_decoder},
        )
        logits, both = outputs.logits, both_sides(encoder_outputs, outputs)
        return Seq2SeqLMOutput(loss=outputs.loss, logits=logits, **both)

    def _by_parent(self, inputs: dict[str, Any], num_items: Any, reduction: str) -> Any:
        """The parent's outputs, where there are no labels or the decoder is not a drop-in model."""
        if reduction != "mean":
            got = f"{reduction!r} without labels or with a {type(self.decoder).__name__}"
            expected = "labels and a decoder of fastplm.models"
            fail(type(self).__name__, "reduction", got, expected, "Leave it out.")
        outputs = super().forward(return_dict=True, **inputs)
        if inputs["labels"] is not None:
            outputs.loss = outputs.loss * batch_share(inputs["labels"], num_items)
        return outputs


def _until_last_label(labels: Tensor, mask: Tensor | None, unpad: Any) -> Tensor | None:
    """The mask [B, T] of a causal decoder without the rows after the last label of a sequence.

    No loss depends on these rows. They stay if ``unpad`` keeps padding, if it gives no capacity and
    the rows cannot be counted, and if labels are flat.
    """
    counted = unpad is None or unpad is True
    stays = unpad is False or (counted and not values_can_be_read(labels))
    if stays or labels.dim() != 2 or (mask is not None and mask.shape != labels.shape):
        return mask
    read = until_last(labels != IGNORE_INDEX)
    return read if mask is None else read & mask.bool()
