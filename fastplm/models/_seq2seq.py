"""Shared by BART and T5: packed rows in the encoder and in the decoder, each with its own padding.

    encoder mask -> unpad once -> encoder on packed rows
    decoder mask, or the rows that are read -> unpad once -> decoder on packed rows, with
    cross-attention packed on both sides -> head and loss at the labelled rows

Hidden states are padded again only if they are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from fastplm._backends import note
from fastplm._checks import check_shape, check_tensor
from fastplm._modes import is_eager, values_can_be_read
from fastplm.hf import of_batch
from fastplm.models._base import (
    CACHE,
    FastplmModel,
    TiedLookup,
    caches,
    check_batch,
    check_mask,
    check_parts,
    check_positions,
    keeps_padding,
    takes_cache,
    unpad_of,
    wants_output,
)
from fastplm.models._encoder import cross_inputs
from fastplm.models._heads import (
    LanguageModel,
    ScaledLoss,
    given_of,
    set_output_rows,
    shape_of,
    wants_logits,
)
from fastplm.models._layer import of_one_forward
from fastplm.models._ragged import (
    Batches,
    Counted,
    RaggedBatch,
    Rows,
    Unpad,
    between,
    either,
    know_their_rows,
    mask_at,
    read_by_callers,
    restore_layout,
    rows_computed,
    unpadded,
    until_last,
)
from fastplm.nn.dropout import on_rows


def source_mask(
    attention_mask: Tensor | None = None,
    encoder_outputs: Any = None,
    inputs_embeds: Tensor | None = None,
    input_ids: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """The padding mask of the source, one for each text: see ``of_batch``."""
    states = None if encoder_outputs is None else encoder_outputs[0]
    given = [one for one in (states, inputs_embeds, input_ids) if isinstance(one, Tensor)]
    return of_batch(attention_mask, given[0].shape[0]) if given else attention_mask


def encoded(
    encoder: Any,
    outputs: Any,
    mask: Tensor | None,
    unpad: Unpad,
    *,
    packs: bool,
    show: bool = True,
    **inputs: Any,
) -> tuple[Any, Tensor, RaggedBatch | None]:
    """(the encoder outputs for the caller, the states for the decoder, how these are packed).

    Args:
        outputs: those that the caller gave; None = run the encoder on ``inputs``.
        mask, unpad: of the encoder's batch.
        packs: whether encoder and decoder can leave its padding out.
        show: whether to return the last hidden state, padded again.
    """
    rows = None
    if packs:
        contiguous = outputs is None and getattr(encoder, "contiguous", False)
        extra_rows = None
        if outputs is None and show and unpad is None:
            given = given_of(inputs)
            extra_rows = read_by_callers(encoder.config, given, mask)
        rows, full = unpadded(mask, extra_rows, unpad, contiguous, encoder.dtype)
        if rows is None and mask is not None and unpad is not False:
            if isinstance(unpad, int) and unpad is not True or values_can_be_read(mask):
                # There is no padding. With None, the decoder would count the rows: a second sync.
                rows = RaggedBatch.whole(mask, None if full else mask)
    if outputs is None:
        if isinstance(encoder, FastplmModel):
            inputs["unpad"] = unpad if rows is None else rows
        outputs = encoder(attention_mask=mask, **inputs)
        states = outputs.last_hidden_state
        shown = states if rows is None or not show else rows.pad(states)
        if rows is not None and show and (unpad is None or isinstance(unpad, Counted)):
            states = rows.pack_rows(shown) if torch.is_grad_enabled() else states
        shown = type(outputs)(**{**outputs, "last_hidden_state": shown if show else None})
        return shown, states, rows
    if isinstance(outputs, tuple | list):
        outputs = BaseModelOutput(*outputs[:3])
    states = outputs.last_hidden_state
    return outputs, states if rows is None else rows.pack_rows(states), rows


def both_sides(encoder_outputs: Any, outputs: Any) -> dict[str, Any]:
    """The fields of an encoder-decoder's output, except last hidden state, loss and logits."""
    return {
        CACHE: outputs.get(CACHE),
        "decoder_hidden_states": outputs.hidden_states,
        "decoder_attentions": outputs.attentions,
        "cross_attentions": outputs.get("cross_attentions"),
        "encoder_last_hidden_state": encoder_outputs.last_hidden_state,
        "encoder_hidden_states": encoder_outputs.hidden_states,
        "encoder_attentions": encoder_outputs.attentions,
    }


class Stack(FastplmModel):
    """Mixin of an encoder or decoder: [B, T] in, [B, T, E] out; only tokens are computed.

    ``EncoderDecoder`` says when padding is computed, and what its hidden states are.
    """

    embed_tokens: Any
    dropout: Any
    gradient_checkpointing: bool
    _takes_rows = True
    #: Whether the parent has an argument ``use_cache``.
    _takes_cache = True
    #: Whether attention depends on distances. Then masked rows between tokens must be computed.
    contiguous = False
    #: Whether the parent looks the ids up, as it does more than that.
    _embeds_ids = False

    #: Returns the layer modules.
    _layers: Callable[[], Any]
    #: Returns the ``layer_idx`` of each of them.
    _layer_numbers: Callable[[], list[Any]]

    def _keeps_padding(
        self,
        masks: Sequence[Tensor | None],
        kwargs: dict[str, Any],
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> str | None:
        """The name in ``PADDING_REASONS`` of what makes the parent compute padding, or None."""
        if use_cache is None:
            use_cache = self._takes_cache and self.config.use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if past_key_values is not None or use_cache:
            return "cache"
        return keeps_padding(self, masks, kwargs)

    def _is_causal(self) -> bool:
        """Whether no row sees those after it."""
        return self._takes_cache

    def _packed_rows(
        self,
        mask: Tensor | None,
        read_rows: Tensor | None,
        extra_rows: Tensor | None,
        unpad: Unpad,
        output_hidden_states: bool,
    ) -> tuple[RaggedBatch | None, Tensor | None]:
        """(the rows that are computed; ``mask``, or None if it masks nothing).

        The rows are None if all are computed, padded. In a decoder, rows after the last one that is
        read cannot influence those and are left out.
        """
        if read_rows is not None and (output_hidden_states or not self._is_causal()):
            extra_rows, read_rows = either(extra_rows, read_rows), None
        seen = mask
        if read_rows is not None:
            reached = until_last(read_rows)
            seen = reached if mask is None else mask.bool() & reached
            extra_rows = extra_rows if mask is None else either(extra_rows, read_rows)
        extra_rows = None if seen is None else extra_rows
        rows, full = unpadded(seen, extra_rows, unpad, self.contiguous, self.dtype)
        return rows, None if full else mask

    def _on_rows(self, **inputs: Any) -> Any:
        """The parent's forward on packed rows [1, N, E]."""
        return super().forward(**inputs)  # type: ignore[misc]

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        sample_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like the parent, with these additional arguments.

        Args:
            output_rows, read_rows, extra_rows: as in ``EncoderDecoder``.
            unpad, encoder_rows, lookup, sample_index: as in ``EncoderModel``.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds)  # type: ignore
        caching: dict[str, Any] = {}
        if self._takes_cache:
            use_cache = caches(use_cache, past_key_values)
            caching = {CACHE: past_key_values, "use_cache": use_cache}
        masks = (attention_mask, encoder_attention_mask)
        check_batch(self, given, input_ids, masks, sample_index, output_rows)
        (batch, seqlen), where = given.shape[:2], type(self).__name__
        attention_mask = of_batch(attention_mask, batch)
        check_positions(where, getattr(self, "embed_positions", None), seqlen, past_key_values)
        if attention_mask is not None and attention_mask.dim() == 2 and not past_key_values:
            check_shape(where, "attention_mask", attention_mask, (batch, seqlen), "[batch, tokens]")
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        unpad = unpad_of(self, unpad, kwargs)

        # --- which rows are computed ---
        packed, padding_reason = None, self._keeps_padding(masks, kwargs, *caching.values())
        if padding_reason is None:
            if output_rows is not None:
                read_rows = mask_at(output_rows, batch, seqlen)
            elif unpad is None and extra_rows is None and read_rows is None:
                extra_rows = read_by_callers(self.config, given, attention_mask)
            more = unpad, wants_output(self, "output_hidden_states", kwargs)
            packed, attention_mask = self._packed_rows(attention_mask, read_rows, extra_rows, *more)
        row_plan = Rows(packed)
        note(lambda: rows_computed(self, (batch, seqlen), attention_mask, row_plan, padding_reason))
        knows = self.training and padding_reason is None
        hidden = knows and know_their_rows(self._layers())
        if packed is None and padding_reason is None:
            # If the parent calls PyTorch's dropout function, only ``_on_rows`` can tell it which
            # rows it computes. So a batch without padding is packed, too.
            by_function = hidden and isinstance(self.dropout, float) and self.dropout > 0.0
            if encoder_rows is not None or (by_function and is_eager(given)):
                row_plan.packed = packed = RaggedBatch.whole(given, attention_mask)
        if knows:
            row_plan.number(given, sample_index, hidden)
            row_plan.draw_seeds(self, given, self._layer_numbers)

        # --- the parent's forward on these rows ---
        if inputs_embeds is None:
            ids = given if packed is None else packed.pack(given)
            if self._embeds_ids:
                kwargs["input_ids"] = ids
            else:
                inputs_embeds = (self.embed_tokens if lookup is None else lookup)(ids)
        elif packed is not None:
            inputs_embeds = packed.pack_rows(inputs_embeds)
        encoder = encoder_hidden_states, encoder_attention_mask, encoder_rows
        states, row_plan.cross = cross_inputs(*encoder, packed)
        forward = super().forward  # type: ignore[misc]
        if packed is not None:
            forward, attention_mask = self._on_rows, packed.key_mask_row()
            caching = {"use_cache": False} if self._takes_cache else {}
        row_plan.layers = of_one_forward(self._layers(), given, self.dtype)
        if row_plan.layers_need_it:
            kwargs["rows"] = row_plan
        kwargs |= dict(inputs_embeds=inputs_embeds, attention_mask=attention_mask, return_dict=True)
        outputs = on_rows(row_plan.numbers, forward, **caching, **states, **kwargs)
        return restore_layout(outputs, row_plan, output_rows, unpad)


class EncoderDecoder(FastplmModel):
    """Mixin of an encoder and a decoder with fused attention, each unpadded once.

    The hidden states of padding that is left out are 0. Transformers returns other values there,
    which have no meaning. The parent's padded computation is used with an attention implementation
    other than "fastplm", 4-D masks, ``output_attentions`` and, in the decoder, a cache, which is
    the default of ``use_cache``.
    """

    _summary = "with fused attention; encoder and decoder compute only tokens."
    encoder: Any
    decoder: Any

    def _default_decoder_ids(self, input_ids: Tensor | None) -> Tensor | None:
        return None

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        unpad: Unpad = None,
        decoder_unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        lookup: TiedLookup | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Like the parent, with these additional arguments.

        Args:
            unpad: what to do with the padding of the encoder's batch: None, True, False, an int or
                a ``RaggedBatch``, as in ``EncoderModel``.
            decoder_unpad: the same for the decoder's batch; by default ``unpad``, if that is True
                or False.
            output_rows: int64 [P], flat positions ``b * T + t`` of the decoder's rows to return,
                -1 in unused slots; the last hidden state is then [P, 1, E].
            read_rows: bool [B, T], the rows of the decoder that the caller reads. The last hidden
                state is [B, T, E] and may be 0 in other rows.
            extra_rows: bool [B, T], rows of the decoder to compute although they are masked.
            lookup: used instead of the word embeddings of encoder and decoder.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self._default_decoder_ids(input_ids)
        check_mask(type(self).__name__, "attention_mask", attention_mask)
        check_mask(type(self).__name__, "decoder_attention_mask", decoder_attention_mask)
        attention_mask = source_mask(attention_mask, encoder_outputs, inputs_embeds, input_ids)
        check_parts(self, self.encoder, self.decoder)
        kwargs["return_dict"] = True
        unpad = unpad_of(self, unpad, kwargs)
        # With a cache, the decoder reads padded encoder states, if any.
        generates = encoder_outputs is not None and past_key_values is not None
        can_pack = self.encoder._keeps_padding((attention_mask,), kwargs) is None
        encoder_outputs, states, rows = encoded(
            *(self.encoder, encoder_outputs, attention_mask, unpad),
            packs=can_pack and not generates,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            lookup=None if lookup is None else partial(lookup, self.encoder.embed_tokens),
            **kwargs,
        )
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=states,
            encoder_attention_mask=attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            unpad=unpad if decoder_unpad is None and isinstance(unpad, bool) else decoder_unpad,
            output_rows=output_rows,
            read_rows=read_rows,
            extra_rows=extra_rows,
            encoder_rows=rows,
            lookup=None if lookup is None else partial(lookup, self.decoder.embed_tokens),
            **{CACHE: past_key_values, **kwargs},
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state, **both_sides(encoder_outputs, outputs)
        )


class ConditionalGeneration(LanguageModel):
    """Mixin of an encoder-decoder with a language-model head. The loss computes no full logits.

    If only the loss is requested, the decoder leaves out the rows after the last label of a
    sequence, which cannot influence the loss.
    """

    _side = "decoder_"
    prepare_decoder_input_ids_from_labels: Callable[[Tensor], Tensor]
    #: Whether the parent can return a cache together with a loss.
    _caches_beside_loss = True

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
        **inputs: Any,
    ) -> Seq2SeqLMOutput:
        """Like the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none. With labels, the cache is None unless ``use_cache``
                is True and the parent also returns a cache.
            loss_positions: int64 [P], flat positions of the labels, -1 in unused slots; fixes the
                shapes of the head. Default: computed from ``labels``.
            output_logits, num_items_in_batch: as in ``…ForMaskedLM``.
            reduction: "none" = the loss of each label, fp32 [P], in the order of the labels (P is
                that of ``labelled_positions``).
            inputs: arguments of the model without head, such as ``unpad`` and ``decoder_unpad``.

        Returns:
            ``Seq2SeqLMOutput``; the loss is as in ``…ForMaskedLM``.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        if labels is not None:
            check_tensor(type(self).__name__, "labels", labels)
            use_cache = bool(use_cache) and self._caches_beside_loss
            if shape_of(inputs, "decoder_") is None:
                inputs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)
        inputs["use_cache"], all_rows = use_cache, wants_logits(self, output_logits, labels)
        inputs["unpad"] = unpad_of(self, inputs.get("unpad"), inputs)
        if labels is not None and not all_rows and inputs["unpad"] is None:
            inputs["unpad"] = True  # a step of training reads the loss
        how = loss_positions, all_rows, num_items_in_batch, reduction
        outputs, loss, logits = self._compute(labels, inputs, *how)
        others = {key: value for key, value in outputs.items() if key != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)

    def _batches(self, inputs: dict[str, Any], all_rows: bool, labelled: Tensor) -> Batches:
        source, target = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
        if inputs.get("unpad") is False:  # which both follow
            return {}
        gaps, rows = None, labelled
        if all_rows:
            gaps = read_by_callers(self.config, given_of(inputs), source)
            rows = inputs["extra_rows"]
        elif not wants_output(self, "output_hidden_states", inputs):
            reached = until_last(labelled)  # as in ``Stack._packed_rows``
            target = reached if target is None else target.bool() & reached
        if self.get_encoder().contiguous:  # type: ignore[attr-defined]
            gaps = None if source is None else between(either(source.bool(), gaps))
            rows = rows if target is None else between(rows | target.bool())
        return {"unpad": (source, gaps), "decoder_unpad": (target, rows)}


class LastEosClassification(ScaledLoss):
    """Mixin of a classifier that reads the last end-of-sequence token: later rows are left out."""

    _one_label_a_text = True
    _summary = "whose decoder ends at the last <eos>, the end-of-sequence token."

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        set_output_rows(self, inputs, None)
        input_ids, shape = inputs.get("input_ids"), shape_of(inputs, "decoder_")
        if input_ids is not None and (shape is None or shape == input_ids.shape):
            inputs["read_rows"] = input_ids == self.config.eos_token_id


class DecoderQuestionAnswering(FastplmModel):
    """Mixin of ``…ForQuestionAnswering``. The softmax includes all rows of the decoder, so only the
    encoder's padding is left out."""

    _summary = "whose encoder computes only tokens."

    def forward(self, **inputs: Any) -> Any:
        set_output_rows(self, inputs, None)
        return super().forward(**{**inputs, "decoder_unpad": False})  # type: ignore[misc]
