"""Heads shared by several families, as mixins in front of Transformers' classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import (
    LOSS_MAPPING,
    ForCausalLMLoss,
    ForMaskedLMLoss,
    ForQuestionAnsweringLoss,
)
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions, MaskedLMOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from fastplm import ops
from fastplm._backends import note
from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm._modes import is_exporting
from fastplm.errors import check_choice, fail
from fastplm.models._base import (
    CACHE,
    FastplmModel,
    TiedLookup,
    check_parts,
    may_read_beside,
    unpad_of,
)
from fastplm.models._ragged import (
    Batches,
    RaggedBatch,
    encoder_batch,
    numbers_of_rows,
    padded,
    read_by_callers,
    slots_of_labels,
    values_at,
)
from fastplm.nn import Linear
from fastplm.nn._rows import (
    IGNORE_INDEX,
    as_tokens,
    batch_share,
    is_plain,
    kind_of,
    labels_at,
    vocabulary_loss,
)
from fastplm.nn.dropout import on_rows

#: The arguments that hold a model's batch, in the order in which they are looked up.
_GIVEN = ("inputs_embeds", "input_ids")
#: The choices of ``reduction``.
REDUCTIONS = ("mean", "none")

#: The arguments that our backbones add to their parents': no loss function gets them.
_OURS = "unpad output_rows extra_rows encoder_rows lookup sample_index".split()

#: (the layers before the projection to the vocabulary, or None; the projection). A head that the
#: user has changed is (None, head): it is called as one module and returns logits.
Head = tuple[Callable[[Tensor], Tensor] | None, Any]


def as_made(model: Any, head: nn.Module) -> bool:
    """Whether a head is one of Transformers' for the family of a model, and has no hooks."""
    own = {one.__module__ for one in type(model).__mro__}
    return is_plain(head) and kind_of(head).__module__ in own


def given_of(inputs: dict[str, Any], prefix: str = "") -> Any:
    """A model's input: ids [B, T], or embeddings [B, T, E]; None without input."""
    given = inputs.get(f"{prefix}inputs_embeds")
    return inputs.get(f"{prefix}input_ids") if given is None else given


def shape_of(inputs: dict[str, Any], prefix: str = "") -> torch.Size | None:
    """The shape [B, T] of a model's input; None without input."""
    given = given_of(inputs, prefix)
    return given.shape[:2] if isinstance(given, Tensor) else None


def wants_logits(model: Any, output_logits: bool | None, labels: Tensor | None) -> bool:
    """Whether a call returns logits over the vocabulary: by default not for labels in training."""
    return (labels is None or not model.training) if output_logits is None else output_logits


def mean_of_labelled(model: Any, loss: Any, labels: Tensor | None, num_items: Any) -> Any:
    """``loss``; in ``eval()`` mode NaN where it is a mean over no labels, as in the parent.

    Trainer leaves NaN out of the mean over batches; a 0 would make that too small.
    """
    if model.training or labels is None:
        return loss
    if num_items is None:
        return loss / (labels != IGNORE_INDEX).any()
    counted = num_items != 0
    if isinstance(counted, Tensor):
        counted = counted.to(loss.device).reshape(())
    return loss / counted


def recorded(outputs: Any) -> dict[str, Any]:
    """The fields of the backbone's output that a head returns unchanged."""
    return {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}


def requested_rows(model: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    """The last hidden state of a backbone called with ``output_rows``: [P, 1, E] -> [P, E]."""
    if hidden.shape[:2] != (positions.shape[0], 1):
        check_parts(model, *(m for m in model.modules() if isinstance(m, PreTrainedModel)))
        got = f"hidden states of {tuple(hidden.shape)} from a {type(model.base_model).__name__}"
        expected = f"{positions.shape[0]} rows, those that the head reads"
        fix = "Use the class of fastplm.models: the backbone of transformers returns all rows."
        fail(type(model).__name__, "base_model", got, expected, fix)
    return hidden[:, 0]


def read_rows(model: Any, hidden: Tensor, rows: Tensor, all_rows: bool) -> Tensor:
    """The rows [P, E] of a backbone that was called with them, or for ``all_rows``."""
    if all_rows:
        return ops.gather_rows(hidden.flatten(0, -2), rows)
    return requested_rows(model, hidden, rows)


def set_output_rows(model: Any, inputs: dict[str, Any], rows: Tensor | str | None) -> None:
    """Ask the backbone for the rows that a head reads; the caller cannot choose others."""
    asked = inputs.get("output_rows")
    if asked is not None:
        got = repr(asked) if isinstance(asked, str) else f"a {type(asked).__name__}"
        fix = "Leave it out, or call the model without head."
        expected = "None, as the head chooses the rows that it reads"
        fail(type(model).__name__, "output_rows", got, expected, fix)
    if rows is not None:
        inputs["output_rows"] = rows


def loss_options(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the parent passes on to its loss function: the arguments that it does not name.

    Those that no model of Transformers knows are then no longer in ``inputs``.
    """
    named = (*(model._named_by_parent or inputs), *_OURS)
    options = {name: value for name, value in inputs.items() if name not in named}
    for name in options.keys() - TransformersKwargs.__annotations__.keys():
        del inputs[name]
    return options


def _loss_function(model: Any) -> Callable[..., Any]:
    """Its ``loss_function``. Without the parent's warning of a class whose name says no loss, which
    would end a compiled program."""
    says_one = getattr(model, "loss_type", None) in LOSS_MAPPING or hasattr(model, "_loss_function")
    if not says_one and torch.compiler.is_compiling():
        return ForCausalLMLoss
    if not says_one and type(model).loss_function is PreTrainedModel.loss_function:
        return ForCausalLMLoss
    return model.loss_function


def add_read_rows(model: Any, inputs: dict[str, Any], rows: Tensor, side: str = "") -> None:
    """Ask the backbone for ``rows``, bool [B, T], beside those that a caller may read."""
    read = inputs.get("extra_rows")
    if read is None and inputs.get(side + "unpad") is None:
        given, mask = given_of(inputs, side), inputs.get(side + "attention_mask")
        read = read_by_callers(model.config, given, mask)
    inputs["extra_rows"] = rows if read is None else read.view(rows.shape) | rows


class LabelledRows:
    """The labelled tokens of a batch: the only rows that the head and the loss compute.

    Args:
        model: its backbone takes ``output_rows``, as ``EncoderModel`` does.
        labels: int64 [B, T], -100 = none.
        inputs: the arguments of the backbone. Arguments that request these rows are added to it.
        positions: int64 [P], flat positions of the labels, -1 in unused slots; None = find them.
        all_rows: whether the caller needs the whole last hidden state [B, T, E].
        exact: whether to find no unused slots, see ``labelled_positions``.
        beside: int64 [R], flat positions of rows that another head reads.
    """

    def __init__(
        self,
        model: Any,
        labels: Tensor,
        inputs: dict[str, Any],
        positions: Tensor | None = None,
        *,
        all_rows: bool,
        exact: bool = False,
        beside: Tensor | None = None,
    ) -> None:
        self.model, self.all_rows = model, all_rows
        self.transform, self.decoder = model._head()
        where, side, dense = type(model).__name__, model._side, model._most_have_labels
        labels = as_tokens(where, labels, shape_of(inputs, side) or labels.shape)
        self.dense, slots = dense or positions is not None, None
        if (unpad := unpad_of(model, inputs.get("unpad"), inputs)) is not None:
            inputs["unpad"] = unpad
        if all_rows:
            add_read_rows(model, inputs, labels != IGNORE_INDEX, side)
        if positions is None:
            batches = encoder_batch(model, inputs, beside)
            if side:
                batches = partial(model._batches, inputs, all_rows)
            # Where most tokens have labels, counting them alone is not worth a wait for a GPU.
            waits = exact or not dense
            slots = slots_of_labels(labels, inputs, batches, side + "unpad", waits=waits)
        self.positions, self.targets = labels_at(
            *(where, labels, labels.shape, positions),
            exact=exact,
            slots=slots,
            argument="loss_positions" if dense else "masked_positions",
        )
        self.rows = self.positions if beside is None else torch.cat((self.positions, beside))
        set_output_rows(model, inputs, None if all_rows else self.rows)
        #: The embedding lookup, which may share its gradient with the decoder.
        self.lookup = TiedLookup(self.decoder, model._embedding_kind)
        if side:
            inputs["lookup"] = self.lookup
        elif inputs.get("inputs_embeds") is None:
            inputs["lookup"] = partial(self.lookup, model.get_input_embeddings())

    def lie_in(self, packed: RaggedBatch) -> None:
        """Find the labels in packed rows, of which all are computed."""
        slots = packed.slots()
        found = values_at(slots, self.positions).masked_fill(self.positions < 0, -1)
        self.positions = self.rows = found

    def read(self, hidden: Tensor) -> Tensor:
        """These rows, and those beside, of the last hidden state: [P + R, E]."""
        return read_rows(self.model, hidden, self.rows, self.all_rows)

    def loss(
        self,
        rows: Tensor,
        normalizer: int | Tensor | None,
        reduction: str = "mean",
        bias: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """The cross-entropy at the labelled tokens, of their ``rows`` [P, E].

        If gradients may flow through the ``logits`` of all tokens, [..., V], it is a function of
        them, as in the parent. The other arguments are those of ``vocabulary_loss``.
        """
        # A trace is checked without gradients, and has to be the same then.
        if logits is not None and (logits.requires_grad or is_exporting()):
            read = ops.gather_rows(logits.flatten(0, -2), self.positions)
            return loss_of_logits(self.model, read, self.targets, normalizer, reduction)
        name = type(self.model).__name__
        beside = "" if self.all_rows else ", without logits"
        note(lambda: f"{name}: head and loss of {rows.shape[0]} labelled rows{beside}")
        loss = vocabulary_loss(
            rows if self.transform is None else self.transform(rows),
            *(self.decoder, self.targets, normalizer, self.lookup.weight, bias),
            dense=self.dense,
            reduction=reduction,
        )
        if self.all_rows and reduction == "mean":
            loss = mean_of_labelled(self.model, loss, self.targets, normalizer)
        return loss


def loss_of_logits(
    model: Any, logits: Tensor, targets: Tensor, normalizer: Any, reduction: str = "mean"
) -> Tensor:
    """The cross-entropy of logits [P, V], which are returned, too."""
    head = nn.Identity()  # these are the logits
    loss = vocabulary_loss(logits, head, targets, normalizer, dense=True, reduction=reduction)
    return mean_of_labelled(model, loss, targets, normalizer) if reduction == "mean" else loss


class LanguageModel(FastplmModel):
    """Mixin of a model whose head predicts tokens. The loss computes only labelled tokens."""

    _takes_rows = True
    #: Whether most tokens have labels, so that their number is not counted.
    _most_have_labels = True
    #: "decoder_" if the tokens of an encoder-decoder's decoder are labelled.
    _side = ""
    _embedding_kind: type[nn.Embedding] = nn.Embedding
    #: What an encoder-decoder counts, for ``slots_of_labels``.
    _batches: Callable[..., Batches]
    lm_head: Any

    def _head(self) -> Head:
        return None, self.lm_head

    def _backbone(self, **inputs: Any) -> Any:
        """The model without the head."""
        return self.base_model(**inputs)

    def _rows_of_head(self, hidden: Tensor, outputs: Any) -> Tensor:
        """What the head reads, of the last hidden state in the backbone's ``outputs``."""
        return hidden

    def _logits_bias(self) -> Tensor | None:
        return None

    #: What the fused loss computes.
    _fused_loss: Callable[..., Tensor]
    #: Whether the parent calls its loss function as ``f(logits=…, labels=…)``, not ``f(…, …)``.
    _loss_by_name = True

    def _loss_of_parent(
        self: Any, labels: Any, inputs: dict[str, Any], reduction: str, **counts: Any
    ) -> Callable[[Tensor], Any] | None:
        """The loss of logits as the parent computes it; None if the fused loss does the same.

        It is that of a ``loss_function`` or a ``config.loss_type`` of the user's, and that with
        another ``ignore_index``.
        """
        if labels is None or self._named_by_parent is None or reduction != "mean":
            return None
        function = _loss_function(self)
        if function is self._fused_loss and not inputs.keys() & {"ignore_index", "vocab_size"}:
            return None
        options = loss_options(self, inputs)
        options |= {name: value for name, value in counts.items() if value is not None}
        vocab_size = self.config.vocab_size
        inputs["unpad"] = False  # nobody knows which rows it reads, so all are computed
        set_output_rows(self, inputs, None)
        note(lambda: f"{type(self).__name__}: the logits of all rows, for its loss_function")
        if self._loss_by_name:
            given: dict[str, Any] = dict(labels=labels, vocab_size=vocab_size)
            return lambda logits: function(logits=logits, **given, **options)
        return lambda logits: function(logits, labels, vocab_size=vocab_size, **options)

    def _compute(
        self,
        labels: Tensor | None,
        inputs: dict[str, Any],
        positions: Tensor | None,
        all_rows: bool,
        num_items: int | Tensor | None,
        reduction: str = "mean",
        chosen: Any = slice(None),
    ) -> tuple[Any, Tensor | None, Any]:
        """(the backbone's outputs, the loss, the logits); None without labels or ``all_rows``.

        ``chosen`` are the tokens of a sequence that have logits.
        """
        check_choice(type(self).__name__, "reduction", reduction, REDUCTIONS)
        loss = logits = labelled = None
        ignored = inputs.pop("ignore_index", IGNORE_INDEX)  # which the backbone does not read
        if labels is not None:
            if reduction == "none":  # which the parent does not have
                labels = labels.masked_fill(labels == ignored, IGNORE_INDEX)
            labelled = LabelledRows(
                self, labels, inputs, positions, all_rows=all_rows, exact=reduction != "mean"
            )
        outputs = self._backbone(**inputs, return_dict=True)
        hidden = outputs.last_hidden_state
        if all_rows:
            unpad: Any = inputs.get(self._side + "unpad")
            transform, decoder = self._head()
            by_caller = isinstance(unpad, RaggedBatch) and unpad.of_caller
            if by_caller and is_plain(decoder, nn.Linear, Linear):
                # Each row has its logits alone, so those of a packed row need no padding.
                if labelled is not None:
                    labelled.lie_in(unpad)
            else:
                hidden = padded(hidden, unpad)
        hidden, bias = self._rows_of_head(hidden, outputs), self._logits_bias()
        if all_rows:
            shown = hidden[:, chosen]
            # Inside, as in an export the product of sizes that are symbols makes constants of them.
            note(lambda: f"{type(decoder).__name__}: logits of {shown.shape[:-1].numel()} rows")
            logits = decoder(shown if transform is None else transform(shown))
            logits = logits if bias is None else logits + bias
        if labelled is not None:
            of_all = logits if isinstance(chosen, slice) and chosen == slice(None) else None
            loss = labelled.loss(labelled.read(hidden), num_items, reduction, bias, of_all)
        return outputs, loss, logits


class MaskedLM(LanguageModel):
    """Mixin of ``…ForMaskedLM``: the last layer, head and loss compute only labelled tokens."""

    _summary = "whose head and loss compute only labelled tokens."
    _most_have_labels = False
    _fused_loss = staticmethod(ForMaskedLMLoss)

    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        **inputs: Any,
    ) -> MaskedLMOutput:
        """Like the parent, with these differences.

        Args:
            labels: int64 [B, T] or flat, -100 = none. A ``loss_function`` set by the user gets
                logits, where the parent asks it.
            masked_positions: int64 [P], flat positions of the labels, -1 in unused slots; fixes the
                shapes of the head, for compiled models and CUDA. Default: computed from ``labels``.
            output_logits: whether to return logits. Default: as in the parent, but not for labels
                while training; there ``logits`` are None. Pass False in ``eval()`` mode if only the
                loss is read.
            num_items_in_batch: the denominator of the loss: the number of labels of all batches
                over which gradients are accumulated. Default: that of this batch.
            reduction: "none" = the loss of each label, fp32 [P], in the order of the positions, 0
                in unused slots.
            inputs: arguments of the model without head, such as ``unpad``.

        Returns:
            ``MaskedLMOutput``; the loss is fp32. Without labels it is 0 in training and where only
            the loss is computed, and NaN with logits in ``eval()`` mode, as in the parent.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        all_rows = wants_logits(self, output_logits, labels)
        kept = None if labels is None else self._kept(labels)
        its = labels if labels is None or kept is None else labels.flatten()[kept]
        counts = dict(num_items_in_batch=num_items_in_batch)
        function = self._loss_of_parent(its, inputs, reduction, **counts)
        if function is not None:
            outputs, _, logits = self._compute(None, inputs, None, True, None)
            logits = logits if kept is None else logits.flatten(0, 1)[kept]
            loss, logits = function(logits), None if output_logits is False else logits
        else:
            how = masked_positions, all_rows, num_items_in_batch, reduction
            outputs, loss, logits = self._compute(labels, inputs, *how)
        return MaskedLMOutput(loss=loss, logits=logits, **recorded(outputs))

    def _kept(self, labels: Tensor) -> Tensor | None:
        """bool [B * T]: the tokens whose logits are returned; None = all."""
        return None


#: The labels of a pair of sequences: that of BERT and that of ALBERT.
PAIR_LABELS = ("next_sentence_label", "sentence_order_label")


class SequencePairPreTraining(LanguageModel):
    """Mixin of a masked-LM head and a classifier of sequence pairs, which reads the pooled output.

    ``loss = MLM loss + pair loss``; if only one kind of labels is given, only that loss.
    """

    _output: Any
    #: The parent's names of the labels and logits of the pairs.
    _pair_label: str
    _pair_logits: str
    _most_have_labels = False
    #: The classifier of the pooled output: [B, E] -> [B, 2].
    _pair_head: Callable[[], nn.Module]

    def _changed(self) -> nn.Module | None:
        """The module of both heads, if there is one and the user has changed it: it is called."""
        return None

    def _rows_of_head(self, hidden: Tensor, outputs: Any) -> Tensor:
        if (changed := self._changed()) is not None:  # the heads do nothing then
            hidden, outputs.pooler_output = changed(hidden, outputs.pooler_output)
        return hidden

    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        num_sequences_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Like the parent, with these differences.

        Args:
            labels, masked_positions, output_logits, num_items_in_batch: as in ``…ForMaskedLM``, for
                the MLM loss and ``prediction_logits``.
            num_sequences_in_batch: the denominator of the pair loss. If only
                ``num_items_in_batch`` is given, the mean pair loss is multiplied by this batch's
                share of the labels. These shares sum to 1 over the accumulated batches, but then
                sequences in batches with more labels have slightly more weight.
            inputs: arguments of the model without head, and the labels of the pairs, int64 [B],
                -100 = none: ``next_sentence_label`` of BERT, 0 = B follows A, 1 = it does not;
                ``sentence_order_label`` of ALBERT, 0 = B follows A, 1 = A follows B. Each class
                accepts either of them, but only one: it has one head for pairs.

        Returns:
            Like the parent; the loss is fp32.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        given = {name: inputs.pop(name, None) for name in PAIR_LABELS}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) == 2:
            got, fix = "a label beside next_sentence_label", "Leave one of them out."
            expected = "one of the two, as there is one head for pairs"
            fail(type(self).__name__, "sentence_order_label", got, expected, fix)
        name, pair_label = next(iter(given.items()), (self._pair_label, None))
        output_logits = wants_logits(self, output_logits, pair_label if labels is None else labels)
        all_rows = output_logits or self._changed() is not None
        if labels is None and not all_rows:
            set_output_rows(self, inputs, "first")
        how = masked_positions, all_rows, num_items_in_batch
        outputs, loss, logits = self._compute(labels, inputs, *how)
        pair_head = self._pair_head()
        pair_logits = with_dropout_rows(self, inputs, lambda: pair_head(outputs.pooler_output))
        if pair_label is not None:
            where = type(self).__name__
            pair_loss = _pair_loss(where, pair_logits, name, pair_label, num_sequences_in_batch)
            if labels is not None and num_sequences_in_batch is None:
                pair_loss = pair_loss * batch_share(labels, num_items_in_batch)
            loss = pair_loss if loss is None else loss + pair_loss
        logits = logits if output_logits else None
        others = {self._pair_logits: pair_logits, **recorded(outputs)}
        return self._output(loss=loss, prediction_logits=logits, **others)


def _pair_loss(
    where: str,
    logits: Tensor,
    name: str,
    label: Tensor,
    num_sequences_in_batch: int | Tensor | None,
) -> Tensor:
    check_tensor(where, name, label)
    check_dtype(where, name, label, INTEGER)
    label = label.flatten().long()
    check_shape(where, name, label, logits.shape[:1], "[B]")
    head = nn.Identity()  # so that these are the logits
    return vocabulary_loss(logits, head, label, num_sequences_in_batch, dense=True)


class CausalLM(LanguageModel):
    """Mixin of a decoder with a language-model head. The loss computes no full logits."""

    _summary = "whose loss computes only labelled tokens, and no full logits."
    _fused_loss = staticmethod(ForCausalLMLoss)

    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        loss_positions: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        **inputs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Like the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none; the token at t is predicted from those before it.
                With labels, the cache is None unless ``use_cache`` is True. A ``loss_function``
                set by the user gets logits, where the parent asks it.
            loss_positions: int64 [P], the flat positions whose next token is a label, -1 in unused
                slots; fixes the shapes of the head. Default: computed from ``labels``.
            output_logits, num_items_in_batch: as in ``…ForMaskedLM``.
            reduction: "none" = the loss of each label, fp32 [P], in the order of the labels (P is
                that of ``labelled_positions``). A ``loss_function`` of the user is then not called.
            inputs: arguments of the model without head, such as ``unpad``; and, as in the parent,
                ``shift_labels``, int64 [B, T]: labels that are shifted already, so that label t is
                predicted at t. (Trainer takes each argument named so for one that is always given.)

        Returns:
            ``CausalLMOutputWithCrossAttentions``; the loss is as in ``…ForMaskedLM``.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        where = type(self).__name__
        if labels is not None:
            check_tensor(where, "labels", labels)
        shift_labels = inputs.pop("shift_labels", None)
        counts = dict(num_items_in_batch=num_items_in_batch, shift_labels=shift_labels)
        function = self._loss_of_parent(labels, inputs, reduction, **counts)
        targets = shifted(labels) if shift_labels is None else shift_labels
        all_rows = wants_logits(self, output_logits, targets)
        inputs["use_cache"] = False if targets is not None and use_cache is None else use_cache
        if torch.jit.is_tracing() and getattr(logits_to_keep, "ndim", 1) == 0:
            # ONNX's exporter with dynamo=False has made a tensor of this number.
            logits_to_keep = int(logits_to_keep)
        chosen: Any = logits_to_keep
        if isinstance(chosen, int):
            chosen = slice(-chosen or None, None)
        if function is not None:
            outputs, _, logits = self._compute(None, inputs, None, True, None, chosen=chosen)
            loss, logits = function(logits), None if output_logits is False else logits
        else:
            how = loss_positions, all_rows, num_items_in_batch, reduction, chosen
            outputs, loss, logits = self._compute(targets, inputs, *how)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            cross_attentions=outputs.get("cross_attentions"),
            **{CACHE: outputs.get(CACHE), **recorded(outputs)},
        )


def shifted(labels: Tensor | None) -> Tensor | None:
    """[B, T] -> [B, T]: the result at t is the label at t + 1; the last one is -100.

    Flat labels are shifted as one sequence, as in Transformers.
    """
    if labels is None:
        return None
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def with_dropout_rows(
    model: Any, inputs: dict[str, Any], function: Callable, *, positions: bool = False, **given: Any
) -> Any:
    """Call ``function(**given)``, and tell dropout that its tensors have one row for each sequence.

    This is for heads. With ``positions``, the tensors are [B, T, E], with a row for each position.
    The shape of the batch is that of the first argument of ``_GIVEN`` in the model's ``inputs``.
    """
    ids = next((inputs[name] for name in _GIVEN if isinstance(inputs.get(name), Tensor)), None)
    if ids is None or not model.training or not model._has_our_attention():
        return function(**given)
    *lead, seqlen = ids.shape[:-1] if ids.is_floating_point() else ids.shape
    first = ids.new_empty(()).expand(math.prod(lead), seqlen if positions else 1)
    return on_rows(numbers_of_rows(first, inputs.get("sample_index"), None), function, **given)


class ScaledLoss(FastplmModel):
    """Mixin of a head that keeps the parent's loss, a mean over labels.

    With ``num_items_in_batch``, the number of labels of all batches over which gradients are
    accumulated, the loss is the sum over this batch divided by that number.
    """

    #: Whether the head's dropout reads a row for each position, not one for each sequence.
    _reads_positions = False

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        """Add the arguments that tell the backbone which rows the head reads."""

    @can_return_tuple
    def forward(
        self,
        *,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        self._select_rows(inputs, labels)
        inputs.update(labels=labels, return_dict=True)
        forward = super().forward  # type: ignore[misc]
        each = self._reads_positions
        outputs = with_dropout_rows(self, inputs, forward, positions=each, **inputs)
        return self._scaled(outputs, labels, num_items_in_batch)

    def _scaled(self, outputs: Any, labels: Tensor | None, num_items: Any) -> Any:
        if labels is not None and num_items is not None:
            share, loss = batch_share(labels, num_items), outputs.loss
            # A mean over no labels is NaN. In ``eval()`` mode it stays, see ``mean_of_labelled``.
            loss = loss.masked_fill(share == 0, 0.0) if self.training else loss
            outputs = type(outputs)(**{**outputs, "loss": loss * share})
        return outputs


class SequenceClassification(ScaledLoss):
    """Mixin of ``…ForSequenceClassification``: the last layer computes only the first tokens."""

    _one_label_a_text = True
    _summary = "whose last layer computes only the first token of a text, such as [CLS]."

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        base = self.base_model
        heads = () if getattr(base, "pooler", None) is not None else self.children()  # type: ignore
        first = not any(may_read_beside(one) for one in heads if one is not base)
        set_output_rows(self, inputs, "first" if first else None)
        if not first and inputs.get("unpad") is None:
            inputs["unpad"] = False


class PooledClassification(SequenceClassification):
    """Mixin of ``…ForSequenceClassification`` whose configuration says what its head reads."""

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        first = self.config.classifier_pooling in ("cls", "bos")
        set_output_rows(self, inputs, "first" if first else None)


class MultipleChoice(SequenceClassification):
    """Mixin of ``…ForMultipleChoice``: sequence classification on inputs [B, choices, T]."""


class TokenClassification(ScaledLoss):
    """Mixin of ``…ForTokenClassification``. Labels of padding count, as in the parent."""

    _summary = "computing only tokens."
    _reads_positions = True

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        where, shape = type(self).__name__, shape_of(inputs)
        if labels is None or shape is None:
            return
        check_tensor(where, "labels", labels)  # of any shape with B * T elements
        check_shape(where, "labels", labels.flatten(), (math.prod(shape),), "one label a token")
        if inputs.get("attention_mask") is not None:
            add_read_rows(self, inputs, (labels != IGNORE_INDEX).reshape(shape))


class QuestionAnswering(FastplmModel):
    """Mixin of ``…ForQuestionAnswering``.

    The parent's softmax includes padding, so all rows are computed, to give the same loss. With
    ``exclude_padding``, padding is left out. Its logits are then the lowest finite number, so that
    no answer begins or ends there.
    """

    _summary = "with fused attention, and ``exclude_padding``."

    @can_return_tuple
    def forward(
        self,
        *,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        exclude_padding: bool = False,
        **inputs: Any,
    ) -> Any:
        """Like the parent, with one additional argument.

        Args:
            exclude_padding: leave padding out of the batch and of the softmax.
        """
        asks, options = self._named_by_parent is not None, loss_options(self, inputs)
        inputs.update(attention_mask=attention_mask, return_dict=True)
        leaves_out = exclude_padding and attention_mask is not None
        if not leaves_out:
            inputs["unpad"] = False
            if not asks:
                inputs.update(start_positions=start_positions, end_positions=end_positions)
                return super().forward(**inputs)  # type: ignore[misc]
        elif attention_mask.dim() != 2:  # type: ignore[union-attr]
            got = f"True with a mask of shape {tuple(attention_mask.shape)}"  # type: ignore
            expected = "a mask [batch, tokens], which says what padding is"
            fix = "Leave it out: then the softmax includes every row."
            fail(type(self).__name__, "exclude_padding", got, expected, fix)
        outputs = super().forward(**inputs)  # type: ignore[misc]
        changed = {name: outputs[name] for name in ("start_logits", "end_logits")}
        if leaves_out:
            padding = ~attention_mask.bool()  # type: ignore[union-attr]
            for name, logits in changed.items():
                changed[name] = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        if start_positions is not None and end_positions is not None:
            given = *changed.values(), start_positions, end_positions
            function: Any = ForQuestionAnsweringLoss
            if asks:
                function = partial(self.loss_function, **options)  # type: ignore[attr-defined]
            changed["loss"] = function(*given)
        return type(outputs)(**{**outputs, **changed})


#: The mixin of each head that needs nothing of its family, by the end of its name.
STANDARD: dict[str, Any] = {
    "ForMultipleChoice": MultipleChoice,
    "ForNextSentencePrediction": SequenceClassification,
    "ForQuestionAnswering": QuestionAnswering,
    "ForSequenceClassification": SequenceClassification,
    "ForTokenClassification": TokenClassification,
}
