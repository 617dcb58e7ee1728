"""The floating-point operations that training needs: the one place where they are counted.

    FLOPs = 6 * (weights * rows that they multiply + 2 * width * pairs that attend, over all layers)

A multiplication and its addition are two operations; each product of the forward comes again twice
in the backward, for the gradient of either operand. Counted is what a step needs, not what a
program does: padding costs nothing, the vocabulary is computed for the rows that have a label, and
causal attention for the pairs that attend. Left out is what is small: norms, activations, softmax,
embeddings that are looked up, poolers and heads of one row a sample, the optimizer.

Source: Kaplan et al. 2020 (arXiv 2001.08361), §2.1 and table 1, with the vocabulary's product and
attention, which they leave out of their ``6 N``; Clark et al. 2020 (arXiv 2003.10555), appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: The share of the tokens that masked models predict.
MASKED = 0.15
#: Families whose feed-forward has a third product, for its gate.
_GATED = ("modernbert",)
# A frozen model has a forward alone.
_TRAINED, _FROZEN = 6, 2


def training_flops(
    config: Any,
    lengths: Sequence[int],
    target_lengths: Sequence[int] = (),
    *,
    masked: float = MASKED,
) -> int:
    """The FLOPs of forward and backward of a batch.

    Args:
        config: of one of the families of ``fastplm pretrain``, or ``ElectraJointConfig``; with two
            stages it is the mean of both. An encoder whose ``is_decoder`` is True reads from left
            to right, and predicts each token.
        lengths: tokens of each sequence, padding left out.
        target_lengths: of the decoder's, where there is one.
        masked: the share of the tokens that a masked model predicts.
    """
    if config.model_type == "fastplm-electra-joint":
        stages = (None,) if config.stage is None else (1, 2)
        return sum(_joint(config, stage, lengths, masked) for stage in stages) // len(stages)
    if config.model_type in _SEQ2SEQ:
        return _TRAINED * _translated(config, lengths, target_lengths)
    if config.model_type in ("gpt2", "openai-gpt"):
        return _TRAINED * _causal(config, lengths)
    predicted = _share(lengths, masked)
    if getattr(config, "is_decoder", False):
        predicted = sum(lengths) - len(lengths)
    return _TRAINED * (_encoder(config, lengths) + _head(config, predicted))


def flops_a_token(
    config: Any, length: int, target_length: int = 0, *, masked: float = MASKED
) -> float:
    """``training_flops`` of one sequence, divided by its tokens, a decoder's among them."""
    targets = (target_length,) if target_length else ()
    return training_flops(config, (length,), targets, masked=masked) / (length + target_length)


def _layers(count: int, width: int, inner: int, rows: int, pairs: int, projected: int = 0) -> int:
    """Four projections and the two of the feed-forward for each row; for each pair that attends
    its score, and its share of the output. ``projected``: the width of all heads, if another."""
    projected = projected or width
    return count * (rows * (4 * width * projected + 2 * width * inner) + 2 * projected * pairs)


def _squares(lengths: Sequence[int]) -> int:
    return sum(length**2 for length in lengths)


def _triangles(lengths: Sequence[int]) -> int:
    """The pairs of causal attention."""
    return sum(length * (length + 1) // 2 for length in lengths)


def _share(lengths: Sequence[int], masked: float) -> int:
    return round(masked * sum(lengths))


def _encoder(config: Any, lengths: Sequence[int]) -> int:
    """Embeddings of another width are projected to that of the layers."""
    rows, width = sum(lengths), config.hidden_size
    embedded = getattr(config, "embedding_size", width)
    pairs = _triangles(lengths) if getattr(config, "is_decoder", False) else _squares(lengths)
    if config.model_type == "deberta-v2":  # two products with positions for each pair
        pairs *= 2
    inner = getattr(config, "hidden_dim", None) or config.intermediate_size  # DistilBERT's name
    if config.model_type in _GATED:
        inner = inner * 3 // 2
    layers = _layers(config.num_hidden_layers, width, inner, rows, pairs)
    for kind in getattr(config, "layer_types", None) or ():
        if kind == "sliding_attention":
            layers -= 2 * width * (pairs - _near(lengths, config.sliding_window))
    return layers + (rows * embedded * width if embedded != width else 0)


def _near(lengths: Sequence[int], window: int) -> int:
    """The pairs that are at most a window apart."""
    pairs = 0
    for length in lengths:
        reach = max(min(window, length - 1), 0)
        pairs += length * (2 * reach + 1) - reach * (reach + 1)
    return pairs


def _head(config: Any, rows: int) -> int:
    """For each row a transform and the vocabulary."""
    embedded = getattr(config, "embedding_size", config.hidden_size)
    return rows * (config.hidden_size * embedded + embedded * config.vocab_size)


def _joint(config: Any, stage: int | None, lengths: Sequence[int], masked: float) -> int:
    """ELECTRA: the generator's masked tokens, and the discriminator with its head."""
    rows, chosen = sum(lengths), _share(lengths, masked)
    small, large = config.generator, config.discriminator
    heads: Mapping[str, Callable[[], int]] = {
        "rtd": lambda: rows * (large.hidden_size**2 + large.hidden_size),
        "rtd_masked": lambda: chosen * (large.hidden_size**2 + large.hidden_size),
        "replace_mlm": lambda: _head(large, chosen),
        "all_tokens_mlm": lambda: _head(large, rows) + rows * large.hidden_size,
    }
    judged = _encoder(large, lengths) + heads[config.objective]()
    filled = 0
    if config.generator_type == "model":
        filled = _encoder(small, lengths) + _head(small, chosen)
    if stage == 1:
        return _TRAINED * filled
    return (_TRAINED if stage is None else _FROZEN) * filled + _TRAINED * judged


def _causal(config: Any, lengths: Sequence[int]) -> int:
    """A row attends to itself and those before it; what the last one predicts is not asked for."""
    rows, width = sum(lengths), config.n_embd
    inner = getattr(config, "n_inner", None) or 4 * width
    head = (rows - len(lengths)) * width * config.vocab_size
    return _layers(config.n_layer, width, inner, rows, _triangles(lengths)) + head


_SEQ2SEQ: Mapping[str, Callable[[Any], tuple[int, int, int, int]]] = {
    # Layers of encoder and decoder, width of the feed-forward, width of all heads.
    "bart": lambda c: (c.encoder_layers, c.decoder_layers, c.encoder_ffn_dim, c.d_model),
    "t5": lambda c: (c.num_layers, c.num_decoder_layers, c.d_ff, c.num_heads * c.d_kv),
}


def _translated(config: Any, lengths: Sequence[int], targets: Sequence[int]) -> int:
    """Encoder; decoder, whose cross-attention projects rows of both sides; head on its rows."""
    read, written, width = sum(lengths), sum(targets), config.d_model
    encoder, decoder, inner, projected = _SEQ2SEQ[config.model_type](config)
    pairs = sum(source * target for source, target in zip(lengths, targets, strict=True))
    cross = 2 * width * projected * (read + written) + 2 * projected * pairs
    return (
        _layers(encoder, width, inner, read, _squares(lengths), projected)
        + _layers(decoder, width, inner, written, _triangles(targets), projected)
        + decoder * cross
        + written * width * config.vocab_size
    )
