"""A pre-trained BART that translates from a language it has not seen.

Source: Lewis et al. 2019 (arXiv 1910.13461), §3.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import BartConfig, TrainerCallback

from fastplm.errors import fail
from fastplm.models._ragged import RaggedBatch
from fastplm.models.bart import BartEncoder, BartForConditionalGeneration

# What is trained in the first step: the new encoder, BART's positions, and what reads its input.
_FIRST_STEP = (
    "encoder.source_encoder.",
    "embed_positions.",
    "encoder.layers.0.self_attn.q_proj.",
    "encoder.layers.0.self_attn.k_proj.",
    "encoder.layers.0.self_attn.v_proj.",
)


class BartTranslationEncoder(BartEncoder):
    """BART's encoder, whose word embeddings are the states of an encoder of source tokens."""

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        source = BartConfig(**config.source_encoder)
        source._attn_implementation = config._attn_implementation
        self.source_encoder = BartEncoder(source)

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        unpad: Any = None,
        lookup: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Like the parent; ``input_ids`` are those of the source vocabulary.

        ``lookup``, of BART's own words, is for the decoder alone.
        """
        if input_ids is not None and inputs_embeds is None:
            outputs = self.source_encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                unpad=unpad,
                sample_index=kwargs.get("sample_index"),
                return_dict=True,
            )
            inputs_embeds, input_ids = outputs.last_hidden_state, None
            if isinstance(unpad, RaggedBatch):
                inputs_embeds = unpad.pad(inputs_embeds)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            unpad=unpad,
            **kwargs,
        )


class BartForTranslation(BartForConditionalGeneration):
    """``BartForConditionalGeneration`` that reads its source through a new encoder.

    A pre-trained BART is the decoder side of a translation model: in place of the encoder's word
    embeddings stands a small encoder with a vocabulary of its own, which learns to map the foreign
    text to what BART can denoise. It is trained in two steps: first the new encoder, BART's
    positions and the input projections of its first layer (``first_step_parameters``), then all.

    Transformers has no such class: load it with ``BartForTranslation.from_pretrained``.

    Args:
        config: a ``BartConfig`` with ``source_encoder``, a dict of the arguments of the new
            encoder's ``BartConfig``; ``d_model`` is the same for both.

    Raises:
        ArgumentValueError: ``source_encoder`` is missing, or of another width.

    Source: Lewis et al. 2019 (arXiv 1910.13461), §3.4.
    """

    def __init__(self, config: BartConfig) -> None:
        source = getattr(config, "source_encoder", None)
        if not isinstance(source, dict) or source.get("d_model") != config.d_model:
            got, expected = f"source_encoder = {source}", f"a dict with d_model = {config.d_model}"
            fail(type(self).__name__, "config", got, expected, "See BartForTranslation.from_bart.")
        super().__init__(config)
        self.model.encoder = BartTranslationEncoder(config)
        self.post_init()

    @classmethod
    def from_bart(
        cls, bart: BartForConditionalGeneration, vocab_size: int, layers: int, pad_token_id: int = 1
    ) -> BartForTranslation:
        """A pre-trained BART with a new source encoder, of the shape of BART's own layers.

        Args:
            bart: ours or Transformers'.
            vocab_size, pad_token_id: of the source tokenizer.
            layers: of the new encoder; the paper adds 6.
        """
        names = ["d_model", "encoder_ffn_dim", "encoder_attention_heads", "max_position_embeddings"]
        names += ["dropout", "attention_dropout", "activation_dropout", "activation_function"]
        config = BartConfig.from_dict(bart.config.to_dict())
        config.source_encoder = {
            **{name: getattr(bart.config, name) for name in names},
            "vocab_size": vocab_size,
            "pad_token_id": pad_token_id,
            "encoder_layers": layers,
        }
        config.architectures = [cls.__name__]
        model = cls._from_config(config, attn_implementation="fastplm")
        missing, _ = model.load_state_dict(bart.state_dict(), strict=False)
        assert all(".source_encoder." in name for name in missing)
        model.generation_config = bart.generation_config
        return model

    def first_step_parameters(self) -> Iterator[nn.Parameter]:
        """What the first step trains; the rest of BART is frozen then."""
        for name, parameter in self.named_parameters():
            if any(part in name for part in _FIRST_STEP):
                yield parameter


class TwoSteps(TrainerCallback):
    """Freezes most of a ``BartForTranslation`` in the first steps.

    A parameter without a gradient has no state in the optimizer and is not changed by it.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        # In every step: after a resume, the first one may be any.
        model.requires_grad_(state.global_step >= self.steps)
        for parameter in model.first_step_parameters():
            parameter.requires_grad_(True)
