"""Shared by BERT, RoBERTa, ALBERT and ELECTRA: packed rows, and few rows in the last layer.

    padding mask -> unpad once -> embeddings and layers on packed rows -> last layer on the rows
    that the head reads -> head and loss; hidden states are padded again only if they are returned

The classes are mixins in front of Transformers' classes. The parent's forward runs on packed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers.utils.generic import ModelOutput, can_return_tuple

from fastplm import ops
from fastplm._backends import note, requested, why_not_triton
from fastplm._checks import check_shape
from fastplm._modes import is_eager, is_exporting, is_fake, values_are_known
from fastplm.hf import of_batch
from fastplm.models._base import (
    CACHE,
    FastplmModel,
    caches,
    check_batch,
    check_positions,
    joined,
    keeps_padding,
    takes_cache,
    unpad_of,
    wants_output,
)
from fastplm.models._functions import is_none
from fastplm.models._layer import (
    PARAMETER,
    Attention,
    FeedForward,
    Join,
    Layer,
    is_patched,
    nothing_hides_modules,
    of_one_forward,
    read_their_parameters,
    ready_layer,
    run_layer,
    stand_for,
)
from fastplm.models._ragged import (
    OF_ATTENTION,
    Counted,
    LastRows,
    RaggedBatch,
    Rows,
    SetsDropoutRows,
    Unpad,
    either,
    know_their_rows,
    mask_at,
    read_by_callers,
    restore_layout,
    rows_computed,
    unpadded,
)
from fastplm.nn import Dropout
from fastplm.nn._rows import are_plain, is_plain, kind_of
from fastplm.nn.dropout import on_rows, rows_now
from fastplm.ops.embedding_layer_norm import OP as EMBEDDINGS

# The classes of a layer's modules that hold others.
_PARTS = ("Attention", "SelfAttention", "SelfOutput", "Intermediate", "Output")
# If the head reads a larger share of the rows than this, the last layer computes all rows.
_WORTH_CUTTING = 0.75
EMBEDDING_TABLES = ("word_embeddings", "position_embeddings", "token_type_embeddings")
_OF_DECODERS = ("encoder_hidden_states", "encoder_attention_mask", CACHE)


class EncoderModel(FastplmModel):
    """Mixin of a backbone: [B, T] in, [B, T, E] out; in between, only tokens are computed.

    A padded batch is unpadded once, before the embeddings, if the values of its mask can be read
    (on CUDA this is a sync). Under ``torch.compile`` and in a CUDA graph it stays padded, unless
    ``unpad`` gives a capacity. The hidden states of such padding are 0. Transformers returns other
    values there, which have no meaning.

    The parent's padded computation is used with an attention implementation other than "fastplm",
    4-D masks, caches, ``output_attentions``, ``chunk_size_feed_forward``, and layers or attention
    modules of the user. If rows are left out, a hook on the pooler runs twice, and the result of
    the second run is used.

    A family whose modules are not called as BERT's says which they are: ``_layers`` and
    ``_layer_numbers``, ``_position_table`` and ``_positions``, ``_pooled``, ``_is_causal``; its
    ``EncoderLayer`` says ``_parts``, ``_around``, ``_last`` and ``_index``.
    """

    _summary = "with fused attention, computing only tokens."
    #: What the parent returns, of a family whose layers one call may run (``_frozen_encoder``).
    _output: type[ModelOutput] | None = None
    #: Further inputs of the parent that have a value for each token, [B, T, …].
    _of_tokens: tuple[str, ...] = ()
    #: Whether attention depends on distances. Then masked rows between tokens must be computed.
    contiguous = False
    _takes_rows = True
    embeddings: Any
    encoder: Any
    pooler: Any

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        unpad: Unpad = None,
        output_rows: Tensor | Literal["first"] | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: Callable[..., Any] | None = None,
        sample_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like the parent, with these additional arguments.

        Args:
            unpad: None = leave out padding that nobody reads; True = all rows that the mask hides;
                False = keep them; an int = a capacity, the number of packed rows, which fixes all
                shapes; a ``RaggedBatch`` = its rows.
            output_rows: int64 [P], flat positions ``b * T + t`` of the rows to return, -1 in
                unused slots; the last layer computes only these rows. "first" = the first row of
                each sequence.
            extra_rows: bool [B, T], rows to compute although they are masked as keys. Default, if
                ``unpad`` is None: those whose id is not that of padding, see ``read_by_callers``.
            encoder_rows: how ``encoder_hidden_states`` [1, N, E] were packed.
            lookup: a ``TiedLookup`` in the word embeddings, used if no cache needs the ids, too.
            sample_index: int64 [B], the sample indices in the training, on which dropout depends.
                Default: 0 ... B - 1.
            kwargs: others of the parent; and of a batch that is packed already, one row [1, N]:
                ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [K + 1], the borders of its K texts,
                ``max_length_q`` and ``max_length_k``, the longest of them. What is returned of
                tokens is [1, N, …], of texts [K, …]; arguments are in the same form.

        Returns:
            Like the parent. With ``output_rows``, the last hidden state is [P, 1, E]. With a
            ``RaggedBatch`` as ``unpad`` it is [1, N, E], and the pooler gets 0 for a sequence whose
            first row is not in that batch.
        """
        cross_attention_args = (encoder_hidden_states, encoder_attention_mask, encoder_rows)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds)  # type: ignore
        masks = (attention_mask, encoder_attention_mask)
        check_batch(self, given, input_ids, masks, sample_index, output_rows, ("first",))
        if no_positions := position_ids is None:
            longest = self._positions_taken(input_ids, given)
            check_positions(type(self).__name__, self._position_table(), longest, past_key_values)
        use_cache = caches(use_cache, past_key_values) if self._is_causal() else use_cache
        unpad = unpad_of(self, unpad, kwargs)
        cache = {CACHE: past_key_values, "use_cache": use_cache}
        kwargs |= {name: value for name, value in cache.items() if value is not None}
        row_plan, first, attention_mask = self._plan_rows(
            *(given, masks, unpad, output_rows, extra_rows, encoder_rows),
            *(sample_index, no_positions, kwargs),
        )
        # A batch without padding takes no longer than in the parent.
        if no_positions and past_key_values is None:
            if first is not None or lookup is not None or not given.is_cpu:
                position_ids = self._positions(input_ids, given)
        if (packed := row_plan.packed) is not None:
            input_ids, token_type_ids = packed.pack(input_ids), packed.pack(token_type_ids)
            position_ids = packed.pack(position_ids)
            inputs_embeds = packed.pack_rows(inputs_embeds)
            kwargs |= {name: packed.pack(kwargs.get(name)) for name in self._of_tokens}
        states, row_plan.cross = cross_inputs(*cross_attention_args, packed)
        row_plan.layers = of_one_forward(self._layers(), given, self.dtype)
        if row_plan.layers_need_it:
            kwargs["rows"] = row_plan
        if lookup is not None and inputs_embeds is None and past_key_values is None:
            inputs_embeds = self._looked_up(lookup, input_ids, position_ids)
            input_ids = input_ids if inputs_embeds is None else None
        inputs: dict[str, Any] = dict(input_ids=input_ids, position_ids=position_ids)
        inputs["inputs_embeds"] = inputs_embeds
        if token_type_ids is not None:  # which some families do not have
            inputs["token_type_ids"] = token_type_ids
        outputs = None
        if not states and (attention_mask is None or packed is not None):
            outputs = self._layers_in_one_call(given, inputs, row_plan, masks, kwargs)
        if outputs is None:
            inputs.update(attention_mask=attention_mask, return_dict=True, **states, **kwargs)
            outputs = on_rows(row_plan.numbers, super().forward, **inputs)  # type: ignore[misc]
        pooled = self._pooled if self._pools() else None
        outputs = restore_layout(outputs, row_plan, output_rows, unpad, first, pooled)
        return _in_dtype(outputs, self.dtype) if row_plan.layers else outputs

    def _layers_in_one_call(self, *given: Any) -> Any:
        """The parent's forward on the rows that are computed; None if its modules must run. In the
        class of a frozen model it is ``_frozen_encoder.layers_call``."""
        return None

    def _embedded(self, **inputs: Any) -> Tensor:
        """What the first layer reads, [1 or B, T, E]."""
        return self.embeddings(**inputs)

    def _position_table(self) -> nn.Module | None:
        return getattr(self.embeddings, "position_embeddings", None)

    def _positions_taken(self, input_ids: Tensor | None, given: Tensor) -> int:
        return given.shape[1]

    def _positions(self, input_ids: Tensor | None, given: Tensor) -> Tensor:
        """The position ids that the parent would use: int64 [1 or B, T]."""
        owner: Any = getattr(self, "embeddings", self)  # GPT's is the model
        seqlen, buffer = given.shape[1], getattr(owner, "position_ids", None)
        if buffer is not None and buffer.shape[-1] >= seqlen:
            return torch.atleast_2d(buffer)[:, :seqlen]
        return torch.arange(seqlen, device=given.device)[None]

    def _pools(self) -> bool:
        return getattr(self, "pooler", None) is not None

    def _pooled(self, first: Tensor) -> Tensor:
        """The pooler applied to the first token of each sequence: [B, 1, E] -> [B, E]."""
        return self.pooler(first)

    def _layers_are_ours(self) -> bool:
        """Whether all layers and their attention support packed rows."""
        return all(
            isinstance(one, EncoderLayer) and one.attends_as_made() for one in self._layers()
        )

    def _layers(self) -> Any:
        return getattr(getattr(self, "encoder", None), "layer", ())

    def _is_causal(self) -> bool:
        return bool(getattr(self.config, "is_decoder", False))

    def _looked_up(
        self, lookup: Callable[..., Any], ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor | None:
        """The embedded words; or, where one op embeds, a tensor that gets the gradient of their
        rows, with the ids as its attribute ``ids``. None: the embeddings take the ids."""
        embeddings: Any = getattr(self, "embeddings", None)
        at_once = isinstance(embeddings, EncoderEmbeddings) and position_ids is not None
        at_once = at_once and not getattr(lookup, "always_reads", False)
        at_once = at_once and embeddings.are_one_call(ids)
        rows = lookup(ids, read=not at_once)
        if at_once and rows is not None:
            rows.ids = ids
        return rows

    def _no_mask(self, given: Tensor) -> Tensor | None:
        """The parent's mask where every token may be attended to."""
        if not self._is_causal():
            return None
        # As ``hf.fastplm_mask`` makes it. Without one, Transformers looks for packed sequences in
        # the position ids: it reads them, a sync on CUDA, and in a CUDA graph adds a full mask.
        return torch.ones(1, 1, 1, 1, 0, dtype=torch.bool, device=given.device)

    def _layer_numbers(self) -> list[Any]:
        """The ``layer_idx`` of each layer, all of which are ours."""
        return [layer._index() for layer in self._layers()]

    def _last_layer(self) -> int | None:
        """The index of the last layer; None if it must compute all rows. All layers are ours."""
        if self._is_causal() or self.contiguous:
            return None
        indices: Any = self._layer_numbers()
        alone = indices and indices.count(indices[-1]) == 1
        whole = alone and not is_patched() and self._layers()[-1]._parts() is not None
        return indices[-1] if whole else None

    def _keeps_padding(
        self, masks: Iterable[Tensor | None], kwargs: dict[str, Any], layers: bool = True
    ) -> str | None:
        """The name in ``PADDING_REASONS`` of what makes the parent compute padding, or None.

        ``layers``: whether to look at the layers, too.
        """
        reason = keeps_padding(self, masks, kwargs)
        if reason is not None:
            return reason
        use_cache = kwargs.get("use_cache", getattr(self.config, "use_cache", False))
        if CACHE in kwargs or (self._is_causal() and use_cache):
            return "cache"
        sizes = (vars(layer).get("chunk_size_feed_forward") for layer in self._layers())
        if self.config.chunk_size_feed_forward or any(sizes):  # rows must be a multiple of it
            return "chunks"
        return None if not layers or self._layers_are_ours() else "layers"

    def _reads_length(self, seqlen: int, no_positions: bool) -> bool:
        """Whether tokens of a batch of this length depend on the length."""
        return False

    def _mask_of(
        self, given: Tensor, mask: Tensor | None, cache: Any, unpad: Unpad
    ) -> tuple[Tensor | None, bool]:
        """(the mask for the layers, whether it is known to mask nothing).

        A padding mask is expanded to [B, T]. A mask with more dimensions is returned unchanged.
        """
        if mask is not None and mask.shape[0] == 1:
            mask = of_batch(mask, given.shape[0])
        if cache is not None:
            return mask, False
        if mask is not None and mask.dim() == 2:
            where, shape = type(self).__name__, given.shape[:2]
            check_shape(where, "attention_mask", mask, shape, "[batch, tokens]")
        full = (unpad is None or isinstance(unpad, bool)) and _are_tokens(mask)
        if isinstance(unpad, Counted):
            full = unpad.tokens == given.shape[0] * given.shape[1]
        return None if full and not self._is_causal() else mask, full

    def _plan_rows(
        self,
        given: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        unpad: Unpad,
        output_rows: Tensor | str | None,
        extra_rows: Tensor | None,
        encoder_rows: RaggedBatch | None,
        sample_index: Tensor | None,
        no_positions: bool,  # whether the caller gives no position ids
        kwargs: dict[str, Any],
    ) -> tuple[Rows, Tensor | None, Tensor | None]:
        """(which rows are computed, flat positions [B] of first tokens, the mask of the layers).

        The positions are None if all rows are computed, and nothing depends on which they are.
        """
        batch, seqlen = given.shape[:2]
        mask, full = self._mask_of(given, masks[0], kwargs.get(CACHE), unpad)
        # In a compiled program, dropout of hidden states does not depend on the samples.
        drops = self.training and (sample_index is not None or is_eager(given))
        row_plan, padding_reason, first = Rows(), None, None
        if not full or drops or output_rows is not None or encoder_rows is not None:
            first = torch.arange(batch, device=given.device) * seqlen
            padding_reason = self._keeps_padding(masks, kwargs)
            if padding_reason is None and self._reads_length(seqlen, no_positions):
                padding_reason = "length"
        if first is not None and padding_reason is None:
            one_each = isinstance(output_rows, str)
            rows: Any = first if one_each else output_rows
            needed: Any = None if rows is None else mask_at(rows, batch, seqlen)
            if self._pools() and (rows is not None or not _are_tokens(mask, 0)):
                needed = either(needed, mask_at(first, batch, seqlen))
            if unpad is None and extra_rows is None and rows is None:
                extra_rows = read_by_callers(self.config, given, mask)
            extra_rows = either(extra_rows, needed)
            row_plan.packed, full = self._unpadded(mask, extra_rows, unpad)
            seen = None if full else mask
            if row_plan.packed is None and encoder_rows is not None:
                row_plan.packed = RaggedBatch.whole(given, seen)
            if rows is not None and not wants_output(self, "output_hidden_states", kwargs):
                row_plan.last = self._last_rows(needed, rows, row_plan.packed, seen, one_each)
        note(lambda: rows_computed(self, (batch, seqlen), mask, row_plan, padding_reason))
        if self.training and padding_reason is None:
            row_plan.number(given, sample_index, drops and know_their_rows(self._layers()))
            layers, numbers = list(self._layers()), self._layer_numbers
            if layers and not getattr(layers[0], "_is_numbered", True):
                row_plan.order = {id(one): at for at, one in enumerate(layers)}
                numbers = lambda: [*row_plan.order.values()]  # noqa: E731
            row_plan.draw_seeds(self, given, numbers)
        if row_plan.packed is not None:
            mask = row_plan.packed.key_mask_row()
            return row_plan, first, self._no_mask(given) if mask is None else mask
        # The parent may find packed sequences in the caller's position ids, if there is no mask.
        if full and padding_reason is None and (no_positions or mask is not None):
            if self._has_our_attention() or not self._is_causal():
                mask = self._no_mask(given)
        return row_plan, first, mask

    def _unpadded(
        self, mask: Tensor | None, extra_rows: Tensor | None, unpad: Unpad
    ) -> tuple[RaggedBatch | None, bool]:
        """``unpadded``: the rows that are computed, and whether no key is known to be masked."""
        return unpadded(mask, extra_rows, unpad, self.contiguous, self.dtype)

    def _last_rows(
        self,
        needed: Tensor,
        rows: Tensor,
        ragged: RaggedBatch | None,
        mask: Tensor | None,
        one_each: bool,  # whether one row of each sequence is needed
    ) -> LastRows | None:
        """The rows of the last layer; None = all of them."""
        index = self._last_layer()
        if index is None or is_exporting():  # ONNX has no stable sort
            return None
        batch, seqlen = needed.shape
        capacity = batch if one_each else rows.shape[0] + (batch if self._pools() else 0)
        longest = 1 if one_each else torch.sym_min(seqlen, capacity)
        total = needed.numel() if ragged is None else ragged.positions.shape[0]
        if values_are_known(needed):
            capacity = int(needed.sum())
        elif statically_known_true(rows.shape[0] >= total):
            return None
        # While sizes are symbols, both conditions are unknown, and the last layer cuts the rows.
        drops = self.training and any(getattr(self.config, p, 0.0) > 0.0 for p in OF_ATTENTION)
        # Attention's dropout depends on the index of a query among those computed, so whether
        # rows are cut must not depend on the batch.
        most = total if drops else _WORTH_CUTTING * total
        if statically_known_true(capacity == 0) or statically_known_true(capacity > most):
            return None
        mask = None if mask is None else mask.bool()
        return LastRows.of(index, needed, capacity, longest, ragged, mask, self.dtype)


def _in_dtype(outputs: Any, dtype: torch.dtype) -> Any:
    """Hidden states in the dtype of the weights, as the parent's norms give them under autocast."""
    outputs.last_hidden_state = outputs.last_hidden_state.to(dtype)
    if outputs.get("hidden_states") is not None:
        outputs.hidden_states = tuple(one.to(dtype) for one in outputs.hidden_states)
    return outputs


def _are_tokens(mask: Tensor | None, columns: Any = slice(None)) -> bool:
    """Whether these columns of a padding mask are known, without a sync, to mask nothing."""
    if mask is None:
        return True
    return mask.dim() == 2 and values_are_known(mask) and bool(mask[:, columns].all())


def cross_inputs(
    states: Tensor | None,
    mask: Tensor | None,
    encoder_rows: RaggedBatch | None,
    ragged: RaggedBatch | None,
) -> tuple[dict[str, Any], RaggedBatch | None]:
    """(a decoder's arguments for the encoder states, the packing of the states or None).

    Args:
        states: [B, S, E], or [1, N, E] with ``encoder_rows``; None = there is no encoder.
        mask: [B, S] of any dtype, 0 = padding; None = no padding, or that of ``encoder_rows``.
        encoder_rows: how the states were packed.
        ragged: how the decoder's rows are packed; None = padded.
    """
    if states is None:
        return {}, None
    key_mask = None
    if encoder_rows is None:
        mask = of_batch(mask, states.shape[0])
    if ragged is None:
        if encoder_rows is not None:
            states, mask = encoder_rows.pad(states), encoder_rows.token_mask()
        key_mask, encoder_rows = mask, None
    elif encoder_rows is not None:
        key_mask = encoder_rows.key_mask_row()
    else:
        encoder_rows, full = unpadded(mask, None, None, dtype=states.dtype)
        if encoder_rows is None:
            if mask is not None and not full:
                key_mask = mask.bool().flatten()[None]
            encoder_rows, states = RaggedBatch.whole(states), states.flatten(0, 1)[None]
        else:
            states = encoder_rows.pack_rows(states)
    given = {"encoder_hidden_states": states}
    if key_mask is not None:
        given["encoder_attention_mask"] = key_mask
    return given, encoder_rows


class EncoderEmbeddings:
    """Mixin of the embeddings: three lookups, their norm and dropout in one kernel on a GPU."""

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *others: Any,
        **kwargs: Any,
    ) -> Tensor:
        looked_up = getattr(inputs_embeds, "ids", None)  # see ``_looked_up``
        if looked_up is not None:
            return self._in_one_call(looked_up, token_type_ids, position_ids, inputs_embeds)
        if inputs_embeds is None and position_ids is not None and self.are_one_call(input_ids):
            return self._in_one_call(input_ids, token_type_ids, position_ids)
        given = (input_ids, token_type_ids, position_ids, inputs_embeds, *others)
        return super().forward(*given, **kwargs)  # type: ignore[misc]

    def are_one_call(self: Any, ids: Tensor | None) -> bool:
        """Whether ``ops.embedding_layer_norm`` stands for the modules."""
        if ids is None or not (is_eager(ids) or is_fake(ids)):
            return False
        if ids.is_cpu and requested(EMBEDDINGS.name) != "triton":
            return False
        if is_patched():
            return False
        modules = self._modules
        norm, forced = modules["LayerNorm"], requested(EMBEDDINGS.name) == "triton"
        return (
            all(looks_up_alone(modules[name]) for name in EMBEDDING_TABLES)
            and is_plain(norm, nn.LayerNorm)
            and read_their_parameters((norm,))
            and is_plain(modules["dropout"], nn.Dropout, Dropout)
            and modules["word_embeddings"].weight.dtype is not torch.float64
            and why_not_triton(ids, forced) is None
        )

    def _in_one_call(
        self: Any, ids: Tensor, types: Tensor | None, positions: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        modules, device = self._modules, ids.device
        words, places, kinds = (modules[name] for name in EMBEDDING_TABLES)
        norm, dropout, dtype = modules["LayerNorm"], modules["dropout"], None
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        options: dict[str, Any] = {"dropout_p": dropout.p if dropout.training else 0.0}
        if options["dropout_p"] and (numbers := rows_now(ids.numel())) is not None:
            options |= {"sample_index": numbers.sample_index, "position": numbers.position}
        out = ops.embedding_layer_norm(
            *(ids.flatten(), words.weight, positions.expand(ids.shape).flatten(), places.weight),
            *(None if types is None else types.expand(ids.shape).flatten(), kinds.weight),
            *(norm.weight, norm.bias),
            word_rows=None if rows is None else rows.flatten(0, -2),
            padding_idx=words.padding_idx,
            position_padding_idx=places.padding_idx,
            eps=norm.eps,
            dtype=dtype,
            **options,
        )
        return out.view(*ids.shape, -1)


def looks_up_alone(table: Any) -> bool:
    """Whether an embedding does nothing but to look rows up."""
    return (
        is_plain(table, nn.Embedding)
        and table.max_norm is None
        and not (table.sparse or table.scale_grad_by_freq)
        and type(table._parameters.get("weight")) in PARAMETER
        and "weight" not in vars(table)
    )


class EncoderLayer(SetsDropoutRows):
    """Mixin of a layer of BERT: it runs as ``_layer`` says, and the last may compute few rows."""

    #: The classes of the modules around those of a ``Layer``, as Transformers made them, and the
    #: method that calls those of the feed-forward, if there is one.
    _around: tuple[type, ...] = ()
    _feed_forward_method: str | None = "feed_forward_chunk"
    #: Whether its attention has a ``layer_idx``.
    _is_numbered = True
    #: The names of the modules of query, key and value, and what stands for the interface.
    _projections = ("query", "key", "value")
    _attention_function: Callable[..., Any] | None = None

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **kwargs: Any
    ) -> Tensor:
        rows: Rows | None = kwargs.get("rows")
        if rows is not None and rows.order:
            rows = kwargs["rows"] = rows.for_layer(rows.order[id(self)])
        last = None if rows is None or rows.last is None else self._last(rows)
        if all(map(is_none, (*others, *map(kwargs.get, _OF_DECODERS)))):
            made = ready_layer(self, rows, hidden_states)
            if made is not None:
                for name in _OF_DECODERS:
                    kwargs.pop(name, None)
                return run_layer(made, hidden_states, attention_mask, last, kwargs)
        if rows is not None and last is None:
            kwargs["rows"] = rows.of_others()
        return super().forward(hidden_states, attention_mask, *others, **kwargs)

    def _last(self: Any, rows: Any) -> LastRows | None:
        return rows.last if rows.last.layer == self._index() else None

    def _index(self: Any) -> int:
        """What tells the layer from others: its number, or else its ``id``."""
        return self._attends()[-1].layer_idx if self._is_numbered else id(self)

    def _attends(self: Any) -> tuple[Any, ...]:
        """The modules down to that which attends, the first of ``_around``; None if one lacks."""
        attention = self._modules.get("attention")
        return attention, None if attention is None else attention._modules.get("self")

    def _parts(self: Any, no_hooks: bool = True) -> Layer | None:
        """The modules that run; None if what is around them is not as it was made, or has hooks."""
        modules = self._modules
        attention, inner, outer = modules["attention"], modules["intermediate"], modules["output"]
        within = attention._modules
        around = (attention, within.get("self"), within.get("output"), inner, outer)
        if not self._is_known(around, no_hooks):
            return None
        itself, join = around[1]._modules, around[2]._modules
        mid, end = inner._modules, outer._modules
        query, key, value = self._projections
        attention = Attention(
            module=around[1],
            head_size=around[1].attention_head_size,
            dropout=itself["dropout"].p,
            projections=(itself[query], itself[key], itself[value]),
            join=Join(join["dense"], join["LayerNorm"], join["dropout"]),
            function=self._attention_function,
        )
        ends = Join(end["dense"], end["LayerNorm"], end["dropout"])
        feed_forward = FeedForward(mid["dense"], mid["intermediate_act_fn"], ends)
        return Layer((attention,), feed_forward, self.training)

    def attends_as_made(self: Any) -> bool:
        """Whether its attention is what Transformers made, which supports packed rows."""
        modules = self._attends()
        kinds = self._around[: len(modules)]
        return tuple(map(type, modules)) == kinds or tuple(map(kind_of, modules)) == kinds

    def _is_known(
        self: Any, around: tuple[Any, ...], no_hooks: bool = True, feeds: Any = None
    ) -> bool:
        """Whether the layer and the modules around those that run are as they were made; ``feeds``
        has the method of the feed-forward, if the layer has it not."""
        name, feeds = self._feed_forward_method, self if feeds is None else feeds
        method = None if name is None else getattr(type(feeds), name, None)
        return (
            (
                tuple(map(type, around)) == self._around
                or tuple(map(kind_of, around)) == self._around
            )
            and (not no_hooks or are_plain(around, *self._around))
            and nothing_hides_modules(self, *around)
            and (name is None or not vars(feeds)["chunk_size_feed_forward"])
            and name not in vars(feeds)
            and (
                name is None or getattr(method, "__module__", "").startswith("transformers.models.")
            )
        )


def layer_like_bert(theirs: Any, prefix: str, module: str) -> Any:
    """The drop-in class of a layer, of a family whose classes are called as BERT's.

    Args:
        theirs: the Python module of the family in Transformers.
        prefix: of its classes.
        module: the name of the Python module that gets the class.
    """
    kinds = tuple(getattr(theirs, prefix + part) for part in _PARTS)
    parent = getattr(theirs, f"{prefix}Layer")
    stand_for(*kinds, parent)
    return joined(EncoderLayer, parent, _around=kinds, __module__=module)


def like_bert(theirs: Any, prefix: str, module: str) -> tuple[Any, Any]:
    """The drop-in classes of embeddings and layer; the arguments are those above."""
    layer = layer_like_bert(theirs, prefix, module)
    embeddings = getattr(theirs, f"{prefix}Embeddings")
    return joined(EncoderEmbeddings, embeddings, __module__=module), layer
