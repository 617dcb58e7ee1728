"""T5: drop-in for the classes of the same names in Transformers.

    encoder mask -> unpad once -> encoder on packed rows  ─┐ cross-attention between two packings
    decoder mask or labels -> unpad once -> decoder on packed rows -> head and loss on the labels

The parent adds a dense bias [1, H, Tq, Tk] to the scores of every layer, zeros in cross-attention.
Here the first layer's table goes from layer to layer in its place, and the attention looks up the
distance j - i in it. Distances are those of columns: what lies between the first and the last token
of a sequence is computed, and hidden from the others, where a mask has holes.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.t5 import modeling_t5
from transformers.utils.generic import can_return_tuple

from fastplm import ops
from fastplm.hf import NAME, NO_BIAS
from fastplm.models._base import FastplmModel, asked_for, check_input_ids, drop_in
from fastplm.models._encoder import _rows_at, cross_inputs
from fastplm.models._heads import ScaledLoss
from fastplm.models._ragged import RaggedBatch, values_can_be_read
from fastplm.models._seq2seq import SharedLookup, Unpad, padded
from fastplm.nn._rows import IGNORE_INDEX, labels_at, vocabulary_loss


def _is_fused(model: Any, mask: Tensor | None, cache: Any, kwargs: dict[str, Any]) -> bool:
    return (
        model.config._attn_implementation == NAME
        and (mask is None or mask.dim() == 2)
        and cache is None
        and not asked_for(model, "output_attentions", kwargs)
    )


def _until_last(chosen: Tensor) -> Tensor:
    """bool [B, T]: True up to the last True of each row."""
    return chosen.flip(1).cumsum(1).flip(1) > 0


def _unpadded(mask: Tensor | None, extra_rows: Tensor | None, unpad: Unpad) -> RaggedBatch | None:
    """The rows of self-attention, without gaps inside a sequence; None = all, padding too."""
    if isinstance(unpad, RaggedBatch):
        return unpad
    counted = unpad is None or unpad is True
    if mask is None or unpad is False or (counted and not values_can_be_read(mask)):
        return None
    kept = mask.bool() if extra_rows is None else mask.bool() | extra_rows
    kept = (kept.cumsum(1) > 0) & _until_last(kept)
    return RaggedBatch.of(mask, kept, None if counted else unpad)


@drop_in
class T5Attention(modeling_t5.T5Attention):
    """Attention that hands on the table of the position bias [buckets, H], not the bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        crosses = key_value_states is not None
        if crosses and cross_lengths is not None:
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = cross_lengths
        dense = position_bias is not None and position_bias.dim() == 4
        table: Tensor | None = None
        bias: Any = position_bias
        fused = not dense and _is_fused(self, mask, past_key_values, kwargs)
        if fused:
            table, bias = position_bias, NO_BIAS
            if table is None and self.has_relative_attention_bias:
                buckets = torch.arange(
                    self.relative_attention_num_buckets, device=hidden_states.device
                )
                table = self.relative_attention_bias(buckets)
            if table is not None:
                bias = ops.T5RelativeBias(
                    table,
                    bidirectional=not self.is_decoder,
                    max_distance=self.relative_attention_max_distance,
                )
        output, dense_bias, weights = super().forward(
            hidden_states, mask, key_value_states, bias, past_key_values, **kwargs
        )
        return output, table if fused else dense_bias, weights


@drop_in
class T5Stack(FastplmModel, modeling_t5.T5Stack):
    """An encoder or decoder: [B, T] in, [B, T, E] out, and only the tokens in between.

    Hidden states of padding are 0; Transformers computes some there, which nothing should read. The
    padded path of the parent stays for: an attention implementation other than "fastplm", masks of
    4 dimensions, caches, ``output_attentions``.
    """

    config: Any

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        unpad: Unpad = None,
        decoder_unpad: bool | int | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: SharedLookup | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with these arguments more.

        Args:
            unpad: None = leave padding out where that is possible; False = do not; an int = the
                number of rows to make room for, which fixes all shapes; a batch = these rows.
            decoder_unpad: takes its place in a decoder.
            extra_rows: bool [B, T], rows to compute although the mask hides them from the others.
            encoder_rows: how ``encoder_hidden_states`` [1, N, E] were unpadded.
            lookup: takes the place of calling the word embeddings.

        Returns:
            As the parent; with a batch given as ``unpad`` the last hidden state is [1, N, E].
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds)
        check_input_ids(type(self).__name__, input_ids, self.config.vocab_size)
        if self.is_decoder and decoder_unpad is not None:
            unpad = decoder_unpad
        ragged = None
        if self._can_unpad(
            attention_mask, encoder_attention_mask, past_key_values, use_cache, kwargs
        ):
            ragged = _unpadded(attention_mask, extra_rows, unpad)
        if ragged is not None:
            input_ids = None if input_ids is None else ragged.pack(input_ids)
            inputs_embeds = None if inputs_embeds is None else ragged.pack_rows(inputs_embeds)
            attention_mask = ragged.key_mask_row()
            kwargs.update(ragged.attention_arguments())
        if encoder_hidden_states is not None:
            kwargs.update(
                cross_inputs(encoder_hidden_states, encoder_attention_mask, encoder_rows, ragged)
            )
        if lookup is not None and inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds, input_ids = lookup(self.embed_tokens, input_ids), None
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        if ragged is None:
            return outputs
        changed: dict[str, Any] = {}
        if not isinstance(unpad, RaggedBatch):
            changed["last_hidden_state"] = ragged.pad(outputs.last_hidden_state)
        if outputs.get("hidden_states") is not None:
            changed["hidden_states"] = padded(outputs.hidden_states, ragged)
        return type(outputs)(**{**outputs, **changed})

    def _can_unpad(
        self,
        mask: Tensor | None,
        encoder_mask: Tensor | None,
        cache: Any,
        use_cache: bool | None,
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether rows can be left out: the parent's padded path does the rest."""
        if use_cache is None:
            use_cache = self.config.use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        return (
            _is_fused(self, mask, cache, kwargs)
            and (encoder_mask is None or encoder_mask.dim() == 2)
            and not (self.is_decoder and use_cache)
            and kwargs.get("cu_seq_lens_q") is None
        )


class _TwoStacks(FastplmModel):
    """Mixin of an encoder and a decoder, each unpadded once."""

    encoder: Any
    decoder: Any

    def _run(
        self,
        encoder_inputs: dict[str, Any],
        decoder_inputs: dict[str, Any],
        encoder_outputs: Any,
        needed: Tensor | None,
        alone: bool,
        unpad: bool | int | None,
        decoder_unpad: bool | int | None,
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any, RaggedBatch | None]:
        """The encoder's outputs, the decoder's, and the decoder's rows.

        Args:
            encoder_inputs: input_ids, attention_mask, inputs_embeds.
            decoder_inputs: the same, past_key_values, use_cache.
            encoder_outputs: given by the caller, or None.
            needed: bool [B, T], rows of the decoder to compute whatever its mask says.
            alone: nobody reads the other rows; those after the last needed one are left out.
            unpad, decoder_unpad: as ``T5Model``.
            kwargs: of both stacks.

        Returns:
            All padded, but the last hidden state of the decoder if it has rows: that is [1, N, E].
        """
        kwargs = dict(kwargs, return_dict=True)
        mask = encoder_inputs["attention_mask"]
        decoder_mask = decoder_inputs["attention_mask"]
        packs = self.decoder._can_unpad(
            decoder_mask,
            mask,
            decoder_inputs["past_key_values"],
            decoder_inputs["use_cache"],
            kwargs,
        )
        rows = None
        if encoder_outputs is None:
            if self.encoder._can_unpad(mask, None, None, False, kwargs):
                rows = _unpadded(mask, None, unpad)
            encoder_outputs = self.encoder(
                **encoder_inputs, unpad=False if rows is None else rows, **kwargs
            )
            states = encoder_outputs.last_hidden_state
            if rows is not None:
                dense = rows.pad(states)
                encoder_outputs = type(encoder_outputs)(
                    **{**encoder_outputs, "last_hidden_state": dense}
                )
                states, rows = (states, rows) if packs else (dense, None)
        else:
            if not isinstance(encoder_outputs, BaseModelOutput):
                encoder_outputs = BaseModelOutput(*encoder_outputs[:3])
            states = encoder_outputs.last_hidden_state
            if packs and mask is not None and unpad is not False and values_can_be_read(mask):
                rows = RaggedBatch.of(mask)
                states = states if rows is None else rows.pack_rows(states)

        decoder_rows = None
        if packs:
            if needed is not None and alone:
                read = _until_last(needed)
                decoder_mask = read if decoder_mask is None else decoder_mask.bool() & read
            decoder_rows = _unpadded(decoder_mask, needed, decoder_unpad)
            ids, embeds = decoder_inputs["input_ids"], decoder_inputs["inputs_embeds"]
            given = ids if embeds is None else embeds
            if decoder_rows is None and rows is not None and given is not None:
                decoder_rows = RaggedBatch.whole(
                    given.shape[0], given.shape[1], given.device, decoder_mask
                )
        outputs = self.decoder(
            **decoder_inputs,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            encoder_rows=rows,
            unpad=False if decoder_rows is None else decoder_rows,
            **kwargs,
        )
        return encoder_outputs, outputs, decoder_rows


def _all_outputs(encoder_outputs: Any, outputs: Any) -> dict[str, Any]:
    """What every output of an encoder-decoder has."""
    return dict(
        past_key_values=outputs.past_key_values,
        decoder_hidden_states=outputs.hidden_states,
        decoder_attentions=outputs.attentions,
        cross_attentions=outputs.cross_attentions,
        encoder_last_hidden_state=encoder_outputs.last_hidden_state,
        encoder_hidden_states=encoder_outputs.hidden_states,
        encoder_attentions=encoder_outputs.attentions,
    )


@drop_in
class T5Model(_TwoStacks, transformers.T5Model):
    """``transformers.T5Model`` with fused attention, on the tokens alone.

    A decoder with a cache, which is the default where ``use_cache`` is not given, stays padded.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        unpad: bool | int | None = None,
        decoder_unpad: bool | int | None = None,
        read_rows: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """As the parent, with these arguments more.

        Args:
            unpad: None = leave the encoder's padding out where that is possible; False = do not; an
                int = the number of rows to make room for, which fixes all shapes.
            decoder_unpad: the same of the decoder.
            read_rows: bool [B, T], the rows of the decoder that are read: those after the last
                of them are left out, which changes nothing for it.
        """
        encoder_outputs, outputs, rows = self._run(
            dict(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds),
            dict(
                input_ids=decoder_input_ids,
                attention_mask=decoder_attention_mask,
                inputs_embeds=decoder_inputs_embeds,
                past_key_values=past_key_values,
                use_cache=use_cache,
            ),
            encoder_outputs,
            read_rows,
            not asked_for(self, "output_hidden_states", kwargs),
            unpad,
            decoder_unpad,
            kwargs,
        )
        hidden = outputs.last_hidden_state
        return Seq2SeqModelOutput(
            last_hidden_state=hidden if rows is None else rows.pad(hidden),
            **_all_outputs(encoder_outputs, outputs),
        )


@drop_in
class T5EncoderModel(FastplmModel, transformers.T5EncoderModel):
    """``transformers.T5EncoderModel`` with fused attention, on the tokens alone.

    ``unpad`` and ``extra_rows`` are those of its ``T5Stack``.
    """


@drop_in
class T5ForConditionalGeneration(_TwoStacks, transformers.T5ForConditionalGeneration):
    """``transformers.T5ForConditionalGeneration`` whose loss never makes all logits.

    With labels and the loss alone asked for, what the decoder computes after the last label of a
    sequence is left out: it cannot influence the loss.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        *,
        unpad: bool | int | None = None,
        decoder_unpad: bool | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """As the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none. With labels, ``logits`` are None, and so is the cache
                unless ``use_cache`` is True.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of labels of
                all batches that gradients are accumulated over. Default: of this batch.
            unpad, decoder_unpad: as in ``T5Model``.

        Returns:
            ``Seq2SeqLMOutput``; the loss is fp32, and 0 if nothing has a label.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        needed = positions = targets = None
        lookup = SharedLookup(self.lm_head)
        if labels is not None:
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self._shift_right(labels)
            given = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
            assert given is not None
            positions, targets = labels_at(type(self).__name__, labels, given.shape[:2], None)
            needed = labels != IGNORE_INDEX
            use_cache = bool(use_cache)
            kwargs["lookup"] = lookup
        encoder_outputs, outputs, rows = self._run(
            dict(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds),
            dict(
                input_ids=decoder_input_ids,
                attention_mask=decoder_attention_mask,
                inputs_embeds=decoder_inputs_embeds,
                past_key_values=past_key_values,
                use_cache=use_cache,
            ),
            encoder_outputs,
            needed,
            not output_logits and not asked_for(self, "output_hidden_states", kwargs),
            unpad,
            decoder_unpad,
            kwargs,
        )
        hidden = outputs.last_hidden_state
        scale = self.model_dim**-0.5 if self.config.scale_decoder_outputs else 1.0
        loss = logits = None
        if positions is not None and targets is not None:
            slots = None if rows is None else rows.slots()
            read = _rows_at(hidden.flatten(0, 1), positions, slots)[:, 0]
            loss = vocabulary_loss(
                read * scale, self.lm_head, targets, num_items_in_batch, lookup.weight
            )
        if labels is None or output_logits:
            dense = hidden if rows is None else rows.pad(hidden)
            logits = self.lm_head(dense * scale)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **_all_outputs(encoder_outputs, outputs))


@drop_in
class T5ForSequenceClassification(ScaledLoss, transformers.T5ForSequenceClassification):
    """``transformers.T5ForSequenceClassification``, whose decoder stops at the last </s>."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqSequenceClassifierOutput:
        if input_ids is not None:
            kwargs["read_rows"] = input_ids == self.config.eos_token_id
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return self._scaled(outputs, labels, num_items_in_batch)


@drop_in
class T5ForTokenClassification(ScaledLoss, transformers.T5ForTokenClassification):
    """``transformers.T5ForTokenClassification`` on the tokens alone.

    Tokens with a label count, whatever the mask says.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        if labels is not None and attention_mask is not None:
            kwargs["extra_rows"] = labels != IGNORE_INDEX
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            labels=labels,
            return_dict=True,
            **kwargs,
        )
        return self._scaled(outputs, labels, num_items_in_batch)


@drop_in
class T5ForQuestionAnswering(FastplmModel, transformers.T5ForQuestionAnswering):
    """``transformers.T5ForQuestionAnswering`` with fused attention.

    The parent's softmax runs over all rows of the decoder, which are all computed; the encoder's
    padding is left out.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            start_positions=start_positions,
            end_positions=end_positions,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **{"decoder_unpad": False, **kwargs},
        )
