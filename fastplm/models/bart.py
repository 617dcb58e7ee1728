"""BART: drop-in for the classes of the same names in Transformers.

Source: Lewis et al. 2019 (arXiv 1910.13461).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
)
from transformers.models.bart import modeling_bart
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from fastplm import ops
from fastplm.models._base import FastplmModel, asked_for, check_input_ids, drop_in
from fastplm.models._encoder import cross_inputs
from fastplm.models._heads import CausalLM, ScaledLoss
from fastplm.models._ragged import RaggedBatch, flags, take
from fastplm.models._seq2seq import (
    SharedLookup,
    Unpad,
    can_pack,
    decoder_rows,
    padded,
    unpadded,
)
from fastplm.nn._rows import IGNORE_INDEX, labels_at, vocabulary_loss


@drop_in
class BartAttention(modeling_bart.BartAttention):
    """Attention whose keys may be of another packed batch than its queries."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if cross_lengths is not None and kwargs.get("key_value_states") is not None:
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = cross_lengths
        return super().forward(hidden_states, *args, **kwargs)


class _Stack(FastplmModel):
    """Mixin of encoder and decoder: the parent adds positions inside, and they start at 0."""

    config: Any
    embed_tokens: nn.Module
    embed_positions: Any
    layernorm_embedding: nn.Module
    layers: nn.ModuleList
    dropout: float
    layerdrop: float
    training: bool

    @capture_outputs
    def _packed(
        self, embeds: Tensor, rows: RaggedBatch, *states: Tensor, **kwargs: Any
    ) -> BaseModelOutput:
        """The parent's forward on packed rows [1, N, E]; ``states`` are the encoder's, if any."""
        positions = self.embed_positions(embeds, position_ids=rows.positions % rows.seqlen)
        hidden = self.layernorm_embedding(embeds + positions.to(embeds.device))
        hidden = nn.functional.dropout(hidden, p=self.dropout, training=self.training)
        mask = rows.key_mask_row()
        for layer in self.layers:
            if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
                continue
            hidden = layer(hidden, mask, *states, **rows.attention_arguments(), **kwargs)
        return BaseModelOutput(last_hidden_state=hidden)

    def _embeds(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        rows: RaggedBatch | None,
        lookup: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """[B, T, E], or [1, N, E] of the rows that are computed."""
        if inputs_embeds is not None:
            return inputs_embeds if rows is None else rows.pack_rows(inputs_embeds)
        assert input_ids is not None
        return (lookup or self.embed_tokens)(input_ids if rows is None else rows.pack(input_ids))


@drop_in
class BartEncoder(_Stack, modeling_bart.BartEncoder):
    """The encoder, on the tokens alone."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        unpad: Unpad = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """As the parent, with these arguments more.

        Args:
            unpad: as in ``BartModel``; a batch = these rows, and hidden states [1, N, E].
            lookup: takes the place of the word embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            return super().forward(input_ids, inputs_embeds=inputs_embeds)
        check_input_ids(type(self).__name__, input_ids, self.config.vocab_size)
        rows = None
        if can_pack(self, (attention_mask,), kwargs):
            rows = unpadded(attention_mask, None, unpad)
        embeds = self._embeds(input_ids, inputs_embeds, rows, lookup)
        kwargs["return_dict"] = True
        if rows is None:
            return super().forward(attention_mask=attention_mask, inputs_embeds=embeds, **kwargs)
        outputs = self._packed(embeds, rows, **kwargs)
        if rows is not unpad:
            outputs["last_hidden_state"] = rows.pad(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs["hidden_states"] = padded(outputs.hidden_states, rows)
        return outputs


@drop_in
class BartDecoder(_Stack, modeling_bart.BartDecoder):
    """The decoder, on the rows that anybody reads and those that they depend on."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As the parent, with these arguments more.

        Args:
            unpad: ``decoder_unpad`` of ``BartModel``.
            output_rows, read_rows, extra_rows: as in ``BartModel``.
            encoder_rows: how ``encoder_hidden_states`` [1, N, E] were unpadded.
            lookup: takes the place of the word embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            return super().forward(input_ids, inputs_embeds=inputs_embeds)
        check_input_ids(type(self).__name__, input_ids, self.config.vocab_size)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        batch, seqlen = given.shape[:2]
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if output_rows is not None:
            read_rows = flags(output_rows, batch * seqlen).view(batch, seqlen)
        if use_cache is None:
            use_cache = self.config.use_cache

        # --- which rows are computed ---
        rows = None
        masks = (attention_mask, encoder_attention_mask)
        crosses = encoder_hidden_states is None or all(
            isinstance(layer.encoder_attn, BartAttention) for layer in self.layers
        )
        cached = past_key_values is not None or use_cache
        if crosses and not cached and can_pack(self, masks, kwargs):
            if asked_for(self, "output_hidden_states", kwargs) and read_rows is not None:
                extra_rows = read_rows if extra_rows is None else extra_rows | read_rows
                read_rows = None
            rows = decoder_rows(attention_mask, read_rows, extra_rows, unpad)
            if encoder_rows is None and encoder_hidden_states is not None:
                wanted = False if unpad is False else None
                encoder_rows = unpadded(encoder_attention_mask, None, wanted)
                if encoder_rows is not None:
                    encoder_hidden_states = encoder_rows.pack_rows(encoder_hidden_states)
            if rows is None and encoder_rows is not None:
                rows = RaggedBatch.whole(batch, seqlen, given.device, attention_mask)
        states: tuple[Tensor, ...] = ()
        if encoder_hidden_states is not None:
            kwargs.update(
                cross_inputs(encoder_hidden_states, encoder_attention_mask, encoder_rows, rows)
            )

        # --- those ---
        embeds = self._embeds(input_ids, inputs_embeds, rows, lookup)
        kwargs["return_dict"] = True
        if rows is None:
            outputs = super().forward(
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                inputs_embeds=embeds,
                use_cache=use_cache,
                **kwargs,
            )
        else:
            if encoder_hidden_states is not None:
                states = (kwargs.pop("encoder_hidden_states"),)
            packed = self._packed(embeds, rows, *states, **kwargs)
            outputs = BaseModelOutputWithPastAndCrossAttentions(
                last_hidden_state=packed.last_hidden_state,
                hidden_states=padded(packed.hidden_states, rows),
            )

        # --- back ---
        hidden = outputs.last_hidden_state
        if output_rows is not None:
            slots = output_rows
            if rows is not None:
                slots = take(rows.slots(), output_rows).masked_fill(output_rows < 0, -1)
            outputs["last_hidden_state"] = ops.gather_rows(hidden.flatten(0, 1), slots)[:, None]
        elif rows is not None:
            outputs["last_hidden_state"] = rows.pad(hidden)
        return outputs


@drop_in
class BartModel(FastplmModel, transformers.BartModel):
    """``transformers.BartModel`` with fused attention, each side unpadded once.

    Hidden states of padding are 0. Transformers computes some there; nothing should read them. The
    padded path of the parent stays for: an attention implementation other than "fastplm", masks of
    4 dimensions, ``output_attentions`` and, on the decoder's side, caches.
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
        unpad: Unpad = None,
        decoder_unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        lookup: SharedLookup | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with these arguments more.

        Args:
            unpad: of the encoder's batch. None = leave padding out where that is possible; False =
                do not; an int = the number of rows to make room for, which fixes all shapes.
            decoder_unpad: the same of the decoder's batch; False if ``unpad`` is False.
            output_rows: int64 [P], flat positions ``b * T + t`` of the decoder's rows that are
                wanted, -1 in unused slots; the last hidden state is then [P, 1, E].
            read_rows: bool [B, T], the decoder's rows that are wanted, in a last hidden state
                [B, T, E] that may be 0 elsewhere.
            extra_rows: bool [B, T], rows of the decoder to compute although its mask hides them.
            lookup: takes the place of both word embeddings.
        """
        rows = None
        if encoder_outputs is None:
            if can_pack(self, (attention_mask,), kwargs):
                rows = unpadded(attention_mask, None, unpad)
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                unpad=False if rows is None else rows,
                lookup=None if lookup is None else partial(lookup, self.encoder.embed_tokens),
                return_dict=True,
                **kwargs,
            )
        ours = {
            "unpad": False if decoder_unpad is None and unpad is False else decoder_unpad,
            "output_rows": output_rows,
            "read_rows": read_rows,
            "extra_rows": extra_rows,
            "encoder_rows": rows,
            "lookup": None if lookup is None else partial(lookup, self.decoder.embed_tokens),
        }
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **ours,
            **kwargs,
        )
        if rows is not None:
            outputs["encoder_last_hidden_state"] = rows.pad(outputs.encoder_last_hidden_state)
            if outputs.encoder_hidden_states is not None:
                outputs["encoder_hidden_states"] = padded(outputs.encoder_hidden_states, rows)
        return outputs


@drop_in
class BartForConditionalGeneration(FastplmModel, transformers.BartForConditionalGeneration):
    """``transformers.BartForConditionalGeneration`` whose loss never makes all logits.

    Source: Lewis et al. 2019 (arXiv 1910.13461).
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
        **kwargs: Any,
    ) -> Any:
        """As the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none. With labels, ``logits`` are None.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of labels of
                all batches that gradients are accumulated over. Default: of this batch.
            kwargs: of the model without head, such as ``unpad`` and ``decoder_unpad``.

        Returns:
            ``Seq2SeqLMOutput``; the loss is fp32, and 0 if nothing has a label. Without a decoder's
            mask, and if nothing but the loss is asked for, the decoder leaves out the rows after
            the last label of each sequence, which no loss depends on.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        inputs = dict(
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else False,
        )
        if labels is None:
            return super().forward(**inputs, return_dict=True)
        given = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if given is None:
            given = self.prepare_decoder_input_ids_from_labels(labels)
            inputs["decoder_input_ids"] = given
        positions, targets = labels_at(type(self).__name__, labels, given.shape[:2], None)
        if output_logits:
            inputs["extra_rows"] = labels != IGNORE_INDEX
        else:
            inputs["output_rows"] = positions
        lookup = SharedLookup(self.lm_head, modeling_bart.BartScaledWordEmbedding)
        outputs = self.model(**inputs, lookup=lookup, return_dict=True)
        hidden = outputs.last_hidden_state
        if output_logits:
            rows = ops.gather_rows(hidden.flatten(0, 1), positions)
        else:
            rows = hidden[:, 0]
        bias = self.final_logits_bias[0]
        loss = vocabulary_loss(rows, self.lm_head, targets, num_items_in_batch, lookup.weight, bias)
        logits = self.lm_head(hidden) + bias if output_logits else None
        others = {key: value for key, value in outputs.items() if key != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)


@drop_in
class BartForSequenceClassification(ScaledLoss, transformers.BartForSequenceClassification):
    """``transformers.BartForSequenceClassification``, whose decoder ends at the last <eos>."""

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
    ) -> Any:
        given = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if input_ids is not None and (given is None or given.shape[:2] == input_ids.shape):
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
class BartForQuestionAnswering(FastplmModel, transformers.BartForQuestionAnswering):
    """``transformers.BartForQuestionAnswering`` with the encoder on its tokens alone.

    The parent's softmax runs over all rows of the decoder, so none is left out.
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
    ) -> Any:
        kwargs["decoder_unpad"] = False
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
            **kwargs,
        )


@drop_in
class BartForCausalLM(CausalLM, transformers.BartForCausalLM):
    """``transformers.BartForCausalLM``, the decoder alone, whose loss never makes all logits."""

    def _head(self) -> tuple[None, nn.Linear]:
        return None, self.lm_head

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the differences of ``BertLMHeadModel``.

        Args:
            labels: int64 [B, T], -100 = none. As in the parent, that at t is predicted at t.
        """
        return super().forward(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            shift_labels=labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            num_items_in_batch=num_items_in_batch,
            return_dict=True,
            **kwargs,
        )
