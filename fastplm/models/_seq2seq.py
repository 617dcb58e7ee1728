"""What BART and T5 share: two paddings, that of the encoder's batch and that of the decoder's.

    encoder's mask -> unpad once -> encoder on packed rows
    decoder's mask, or the rows that are read -> unpad once -> decoder on packed rows, with
    cross-attention packed on both sides -> head and loss at the labelled rows

Each side is padded back only where the caller gets to see its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils.generic import can_return_tuple

from fastplm import ops
from fastplm.hf import NAME
from fastplm.models._base import FastplmModel, asked_for
from fastplm.models._ragged import RaggedBatch, values_can_be_read
from fastplm.nn._rows import IGNORE_INDEX, as_normalizer, labels_at
from fastplm.nn._tied_embedding import shares_table, tied_lookup

Unpad = bool | int | RaggedBatch | None


def can_pack(model: Any, masks: Sequence[Tensor | None], kwargs: dict[str, Any]) -> bool:
    """Whether rows can be left out: the parent's padded path does the rest."""
    return (
        model.config._attn_implementation == NAME
        and all(mask is None or mask.dim() == 2 for mask in masks)
        and kwargs.get("cu_seq_lens_q") is None
        and not asked_for(model, "output_attentions", kwargs)
    )


def unpadded(mask: Tensor | None, extra_rows: Tensor | None, unpad: Unpad) -> RaggedBatch | None:
    """The rows of a batch that are computed; None = all of them, padded.

    Args:
        mask: [B, T], 0 = padding.
        extra_rows: bool [B, T], rows to compute although the mask hides them from the others.
        unpad: None = leave padding out where that is possible; False = do not; an int = the number
            of rows to make room for, which fixes all shapes; a batch = these rows.
    """
    if isinstance(unpad, RaggedBatch):
        return unpad
    if mask is None or unpad is False:
        return None
    if unpad is not None and unpad is not True:
        return RaggedBatch.of(mask, extra_rows, unpad)
    return RaggedBatch.of(mask, extra_rows) if values_can_be_read(mask) else None


def decoder_rows(
    mask: Tensor | None, read_rows: Tensor | None, extra_rows: Tensor | None, unpad: Unpad
) -> RaggedBatch | None:
    """The rows that a causal decoder computes.

    Args:
        mask, extra_rows, unpad: as in ``unpadded``.
        read_rows: bool [B, T], the rows whose last hidden state anybody looks at: those after the
            last one of a sequence influence none of them. None = all.
    """
    if read_rows is not None:
        reached = read_rows.flip(1).cumsum(1).flip(1) > 0
        if mask is None:
            mask = reached
        else:
            mask = mask.bool() & reached
            extra_rows = read_rows if extra_rows is None else extra_rows | read_rows
    return unpadded(mask, None if mask is None else extra_rows, unpad)


def padded(states: tuple[Tensor | None, ...] | None, rows: RaggedBatch | None) -> Any:
    """Hidden states [1, N, E] of all layers -> [B, T, E]."""
    if states is None or rows is None:
        return states
    return tuple(None if state is None else rows.pad(state) for state in states)


class SharedLookup:
    """Lookups of several embeddings that share their table with a vocabulary head.

    The gradients of all uses are made in one buffer. The loss is the one reader of ``weight``.

    Args:
        decoder: the head's projection to the vocabulary.
        kind: the class of the embeddings; another one is called as it is.
    """

    def __init__(self, decoder: nn.Linear, kind: type[nn.Embedding] = nn.Embedding) -> None:
        self.decoder, self.kind = decoder, kind
        self.weight: Tensor = decoder.weight

    def __call__(self, embedding: Any, input_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., E]."""
        if not shares_table(embedding, self.decoder, self.kind):
            return embedding(input_ids)
        # The table that one lookup returns is the next one's: their gradients pile up on the way.
        rows, self.weight = tied_lookup(embedding, input_ids, self.weight)
        return rows


class CrossAttention:
    """Mixin of an attention whose keys may be of another packed batch than its queries."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if cross_lengths is not None and kwargs.get("key_value_states") is not None:
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = cross_lengths
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


class Seq2SeqModel(FastplmModel):
    """Mixin of an encoder-decoder without head: each side unpadded once.

    Hidden states of padding are 0. Transformers computes some there; nothing should read them. The
    padded path of the parent stays for: an attention implementation other than "fastplm", masks of
    4 dimensions, ``output_attentions`` and, on the decoder's side, caches.
    """

    encoder: Any
    decoder: Any

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
            decoder_unpad: the same of the decoder's batch.
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
            "unpad": decoder_unpad,
            "output_rows": output_rows,
            "read_rows": read_rows,
            "extra_rows": extra_rows,
            "encoder_rows": rows,
            "lookup": None if lookup is None else partial(lookup, self.decoder.embed_tokens),
        }
        outputs = super().forward(  # type: ignore[misc]
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


class ConditionalGeneration(FastplmModel):
    """Mixin of ``…ForConditionalGeneration``, whose loss never makes all logits."""

    lm_head: nn.Linear

    def _backbone(self) -> Callable[..., Any]:
        """What takes the arguments of ``Seq2SeqModel.forward``."""
        raise NotImplementedError

    def _embedding_class(self) -> type[nn.Embedding]:
        return nn.Embedding

    def _before_head(self, hidden: Tensor) -> Tensor:
        """What comes before the projection to the vocabulary."""
        return hidden

    def _head_bias(self) -> Tensor | None:
        """[V], what comes after it."""
        return None

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
            return super().forward(**inputs, return_dict=True)  # type: ignore[misc]
        given = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if given is None:
            given = inputs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[attr-defined]
        where = type(self).__name__
        positions, targets = labels_at(where, labels, given.shape[:2], None)
        if output_logits:
            inputs["extra_rows"] = labels != IGNORE_INDEX
        else:
            inputs["output_rows"] = positions
        lookup = SharedLookup(self.lm_head, self._embedding_class())
        outputs = self._backbone()(**inputs, lookup=lookup, return_dict=True)
        hidden = self._before_head(outputs.last_hidden_state)
        if output_logits:
            rows = ops.gather_rows(hidden.flatten(0, 1), positions)
        else:
            rows = hidden[:, 0]
        bias = self._head_bias()
        loss = ops.linear_cross_entropy(
            rows,
            lookup.weight,
            targets,
            linear_bias=bias,
            normalizer=as_normalizer(num_items_in_batch, rows.device),
        )
        logits = None
        if output_logits:
            logits = self.lm_head(hidden)
            logits = logits if bias is None else logits + bias
        others = {key: value for key, value in outputs.items() if key != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **others)
