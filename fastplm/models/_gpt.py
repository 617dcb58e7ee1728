"""Shared by GPT and GPT-2: a causal backbone on packed rows, and heads that read few rows."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm._modes import values_are_known
from fastplm.errors import fail
from fastplm.hf import as_booleans
from fastplm.models._base import CACHE, FastplmModel, wants_output, warn_of_weights
from fastplm.models._encoder import EncoderModel
from fastplm.models._heads import (
    LabelledRows,
    LanguageModel,
    add_read_rows,
    read_rows,
    requested_rows,
    set_output_rows,
    shifted,
    wants_logits,
    with_dropout_rows,
)
from fastplm.models._ragged import mask_at
from fastplm.nn._rows import as_normalizer, as_tokens, batch_share

_logger = logging.get_logger(__name__)
#: What a head returns of its backbone; there is no cross-attention.
_BESIDE = (CACHE, "hidden_states", "attentions")


class CausalModel(EncoderModel):
    """Mixin of a causal backbone: [..., T] in, [..., T, E] out; only tokens are computed.

    The arguments are those of ``EncoderModel``. A row that may attend to no token, such as padding
    at the left, has no defined output: each attention implementation of the parent returns another
    one. Here the attention output is 0.
    """

    #: The drop-in attention class of each block.
    _attention: type
    h: Any

    @can_return_tuple
    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_rows: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if self._has_our_attention() and wants_output(self, "output_attentions", inputs):
            warn_of_weights()
        for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            if given is not None:
                check_tensor(type(self).__name__, name, given)
        lead = None
        if input_ids is not None and input_ids.dim() > 2:
            lead = input_ids.shape[:-1]
        elif inputs_embeds is not None and inputs_embeds.dim() > 3:
            lead = inputs_embeds.shape[:-2]
            inputs_embeds = inputs_embeds.flatten(0, -3)
        if lead is None and attention_mask is not None and attention_mask.dim() == 3:
            if self._has_our_attention():  # the parent takes no mask [B, F, T]
                attention_mask = as_booleans(type(self).__name__, attention_mask)[:, None]
        for name in ("token_type_ids", "position_ids"):
            inputs[name] = _two_dimensional(inputs.get(name))
        outputs = super().forward(
            input_ids=_two_dimensional(input_ids),
            # A 4-D mask is passed on unchanged.
            attention_mask=_two_dimensional(attention_mask, most=3),
            inputs_embeds=inputs_embeds,
            output_rows=output_rows,
            return_dict=True,
            **inputs,
        )
        if lead is None or output_rows is not None:
            return outputs
        changed = {"last_hidden_state": outputs.last_hidden_state.unflatten(0, lead)}
        if outputs.get("hidden_states") is not None:
            changed["hidden_states"] = (
                *outputs.hidden_states[:-1],
                changed["last_hidden_state"],  # the same tensor, for its gradient
            )
        return type(outputs)(**{**outputs, **changed})

    def _position_table(self) -> Any:
        return getattr(self, "wpe", None)

    def _embed(
        self: Any,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
    ) -> Tensor:
        words = self.get_input_embeddings()
        hidden: Tensor = words(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        hidden = hidden + self._position_table()(position_ids)
        return self.drop(hidden if token_type_ids is None else hidden + words(token_type_ids))

    def _is_causal(self) -> bool:
        return True

    def _layers(self) -> Any:
        return self.h

    def _layer_numbers(self) -> list[Any]:
        # GPT's blocks have none, so ``OpenAIGPTModel`` counts them.
        return [getattr(block.attn, "layer_idx", at) for at, block in enumerate(self.h)]

    def _layers_are_ours(self) -> bool:
        return all(isinstance(getattr(block, "attn", None), self._attention) for block in self.h)


def _two_dimensional(tensor: Tensor | None, most: int | None = None) -> Tensor | None:
    if tensor is None or tensor.dim() <= 2 or (most is not None and tensor.dim() > most):
        return tensor
    return tensor.flatten(0, -2)


class DoubleHeads(LanguageModel):
    """Mixin of ``…DoubleHeadsModel``: a language-model loss and a multiple-choice loss.

    Both heads compute only the rows they need. Source: Radford et al. 2018, "Improving Language
    Understanding by Generative Pre-Training", §3.
    """

    _summary = "whose heads compute only the rows they need."
    #: Trainer would count the first label of each row, too, which nothing predicts.
    accepts_loss_kwargs = False
    multiple_choice_head: Any
    _output: Any

    @can_return_tuple
    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mc_token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mc_labels: Tensor | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Like the parent, with these differences.

        Args:
            mc_token_ids: int64 [B, C], the position in each choice that is classified; default the
                last of its T, even if that is padding.
            labels: int64 [B, C, T], -100 = none; the token at t is predicted from those before it.
            mc_labels: int64 [B], the correct choice, -100 = none. With either kind of labels, the
                cache is None unless ``use_cache`` is True.
            output_logits: whether to return logits over the vocabulary. Default: as in the parent,
                but not for ``labels`` while training.
            num_items_in_batch: the denominator of the language-model loss; ``mc_loss`` is then
                multiplied by this batch's share of these labels.
            inputs: of the model without head, such as ``unpad``.

        Returns:
            Like the parent; ``loss`` is the language-model loss only, as in ``…ForMaskedLM``.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) values.
        """
        where, head = type(self).__name__, self.multiple_choice_head
        if inputs_embeds is not None:
            *lead, seqlen, _ = inputs_embeds.shape
        elif input_ids is not None:
            *lead, seqlen = input_ids.shape
        else:
            return self.base_model()
        if inputs.get("use_cache") is None and (labels is not None or mc_labels is not None):
            inputs["use_cache"] = False
        reads_one = head.summary_type == "cls_index"
        if not reads_one:
            # The other summary types may read padding.
            inputs["unpad"] = False

        # --- the rows that the heads read ---
        output_logits = wants_logits(self, output_logits, labels)
        all_rows, shape = output_logits or not reads_one, (prod(lead), seqlen)
        loss = mc_loss = chosen = labelled = None
        if reads_one:
            chosen = _choice_rows(where, mc_token_ids, lead, seqlen, self.lm_head.weight.device)
            inputs["extra_rows"] = None
            if all_rows:
                given = dict(inputs, input_ids=input_ids, inputs_embeds=inputs_embeds)
                add_read_rows(self, given, mask_at(chosen, *shape))
                inputs["extra_rows"] = given["extra_rows"]
        if labels is not None:
            flat: Any = shifted(labels.reshape(-1, labels.shape[-1]))
            labels = as_tokens(where, flat, shape)
            labelled = LabelledRows(self, labels, inputs, all_rows=all_rows, beside=chosen)
        else:
            set_output_rows(self, inputs, None if all_rows else chosen)
        inputs.update(input_ids=input_ids, inputs_embeds=inputs_embeds)
        outputs = self.base_model(return_dict=True, **inputs)

        # --- the two heads on these rows ---
        hidden = seen = outputs.last_hidden_state
        logits = self.lm_head(hidden) if output_logits else None
        rows: Any = None
        if labelled is not None:
            read, count = labelled.read(hidden), labelled.positions.shape[0]
            loss = labelled.loss(read[:count], num_items_in_batch, logits=logits)
            rows = read[count:]
        elif chosen is not None:
            rows = read_rows(self, hidden, chosen, all_rows)
        if reads_one:
            seen, mc_token_ids = rows.view(*lead, 1, -1), None
        mc_logits = with_dropout_rows(self, inputs, lambda: head(seen, mc_token_ids)).squeeze(-1)
        if mc_labels is not None:
            mc_loss = nn.functional.cross_entropy(
                mc_logits.view(-1, mc_logits.shape[-1]), mc_labels.view(-1)
            )
            if labels is not None:
                mc_loss = mc_loss * batch_share(labels, num_items_in_batch)
        made = dict(loss=loss, mc_loss=mc_loss, logits=logits, mc_logits=mc_logits)
        return self._output(**made, **{key: outputs[key] for key in _BESIDE if key in outputs})


def _choice_rows(
    where: str, ids: Tensor | None, lead: list[int], seqlen: int, device: torch.device
) -> Tensor:
    """Flat positions int64 [prod(lead)] of the tokens that are classified."""
    starts = torch.arange(prod(lead), device=device) * seqlen
    if ids is None:
        return starts + (seqlen - 1)
    check_tensor(where, "mc_token_ids", ids)
    check_dtype(where, "mc_token_ids", ids, INTEGER)
    check_shape(where, "mc_token_ids", ids, lead, "[batch, choices]")
    inside = ((ids >= 0) & (ids < seqlen)).all()
    if not values_are_known(ids):
        torch._assert_async(inside, "mc_token_ids: a position outside the sequence")
    elif not inside:
        got, expected = "a position outside the sequence", f"0 to {seqlen - 1}"
        fix = "It is the position of a token in its choice, which has T of them."
        fail(where, "mc_token_ids", got, expected, fix)
    return starts + ids.flatten()


class LastTokenClassification(FastplmModel):
    """Mixin of ``…ForSequenceClassification``, which reads only the last token of a sequence."""

    _one_label_a_text = True
    _summary = "whose head reads only the last token."
    score: nn.Linear
    _output: Any

    @can_return_tuple
    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Like the parent, with these differences.

        Args:
            num_items_in_batch: the denominator of the loss; default the number of labels.
            use_cache: return a cache; default False.
            inputs: of the model without head, such as ``unpad``.

        Raises:
            ArgumentValueError: more than one sequence without ``config.pad_token_id``, which is
                needed to find their ends.
        """
        rows = None
        if input_ids is not None or inputs_embeds is not None:
            rows = self._last_tokens(input_ids, inputs_embeds)
        set_output_rows(self, inputs, rows)
        inputs.update(input_ids=input_ids, inputs_embeds=inputs_embeds)
        outputs = self.base_model(use_cache=bool(use_cache), return_dict=True, **inputs)
        assert rows is not None, "without inputs the backbone raises"
        logits = self.score(requested_rows(self, outputs.last_hidden_state, rows))
        loss = None
        if labels is not None:
            items = as_normalizer(num_items_in_batch, logits.device)
            loss = ForSequenceClassificationLoss(
                labels, logits, self.config, num_items_in_batch=items
            )
            if self.config.problem_type != "single_label_classification":
                # The other losses ignore num_items_in_batch and are means.
                loss = loss * batch_share(labels, items)
        given = {name: outputs[name] for name in _BESIDE if name in outputs}
        return self._output(loss=loss, logits=logits, **given)

    def _last_tokens(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Flat positions int64 [B] of the last tokens, found by their ids, not by the mask."""
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        pad = self.config.pad_token_id
        batch, seqlen = given.shape[:2]
        if pad is None and batch != 1:
            expected = "one sequence, as config.pad_token_id is None"
            fix = "Set model.config.pad_token_id: the last token before padding is classified."
            fail(type(self).__name__, "input_ids", f"a batch of {batch}", expected, fix)
        starts = torch.arange(batch, device=given.device) * seqlen
        if pad is None or input_ids is None:
            if pad is not None:
                _logger.warning_once(
                    f"{type(self).__name__} cannot detect padding in `inputs_embeds`: it "
                    "classifies the last row of each sequence."
                )
            return starts + (seqlen - 1)
        places = torch.arange(seqlen, device=given.device)
        return starts + (places * (input_ids != pad)).amax(-1)
