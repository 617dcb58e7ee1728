"""BERTScore: how well the tokens of a text match those of a reference.

texts -> each distinct one once -> hidden states of one layer, packed -> ops.maxsim of all pairs
-> weighted means of the matches
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastplm import ops
from fastplm.data._files import lines_of
from fastplm.errors import DataError, check
from fastplm.inference._batches import (
    Tokens,
    batches,
    check_texts,
    cuts,
    limit_of,
    offsets_of,
    progress_bar,
)
from fastplm.inference._encoder import Encoder
from fastplm.run.settings import BATCH_TOKENS

_WHERE = "bert_score"
#: Tokens of the pairs that are matched together; their states are in memory.
_PAIR_TOKENS = 1 << 13


class BERTScore(NamedTuple):
    """The scores of each candidate.

    Args:
        precision: [N], how well its tokens are matched by those of the reference.
        recall: [N], how well those of the reference are matched by its own.
        f1: [N], the harmonic mean of the two.
    """

    precision: Tensor
    recall: Tensor
    f1: Tensor


def bert_score(
    candidates: Sequence[str],
    references: Sequence[str] | Sequence[Sequence[str]],
    model: Any,
    tokenizer: Any,
    *,
    idf: bool | Sequence[str] = False,
    layer: int | None = None,
    baseline: str | Path | Sequence[float] | None = None,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
) -> BERTScore:
    """The similarity of texts to references, from the best matches of their tokens.

    ``recall = sum_j w_j max_i cos(x_i, y_j) / sum_j w_j`` over the tokens x of the candidate and y
    of the reference; precision is the same with the two exchanged, and F1 their harmonic mean.

    Each distinct text is encoded once. The states of a text are kept as long as a later pair needs
    them.

    Args:
        candidates: N texts.
        references: a text for each candidate, or several: then the best precision, the best recall
            and the best F1 count, each on its own.
        model: of ``fastplm.models`` or Transformers; heads and decoders are left out.
        tokenizer: its fast tokenizer.
        idf: weigh each token by ``log((M + 1) / (m + 1))``, where m of M texts contain it: of the
            references, or of the texts given here. False = 1 for each token, and 0 for the [CLS]
            and [SEP] of the tokenizer.
        layer: the hidden states that are compared: 0 = the embeddings, i = those after layer i;
            layers above are not computed. Default the last one; the paper's authors found for each
            model the layer that agrees best with human judgement, often one below (BERT-base 9 of
            12, RoBERTa-large 17 of 24).
        baseline: scores b of unrelated texts; each score s becomes ``(s - b) / (1 - b)``. Three
            numbers (precision, recall, F1), or a file of bert-score: a header ``LAYER,P,R,F`` and
            a line for each layer, separated by commas or tabs.
        max_length: tokens of a text at most, special tokens among them; default what the model
            takes. The rest is cut off.
        batch_tokens: tokens of a batch; only speed and memory depend on it.
        progress: show a bar on stderr.

    Returns:
        ``BERTScore(precision, recall, f1)`` on the CPU, fp32 (fp64 of a model in fp64). All are 0
        (before ``baseline``) where the candidate or the reference has no tokens but special ones;
        precision or recall is 0 where no token has a weight.

    Numerics:
        Similarities in fp32. bert-score 0.3.13 gives the same, but for rounding; it takes a
        similarity below 0 for 0 where it pads.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument does not fit.
        DataError: the file of the baseline has no such layer.

    Source: Zhang et al. 2020 (arXiv 1904.09675), §3.
    """
    groups = _groups(candidates, references)
    encoder = Encoder(_WHERE, model, (-1 if layer is None else layer,))
    lowest = _baseline(baseline, encoder.layers[0])

    numbers: dict[str, int] = {}  # of the distinct texts
    each = zip(candidates, groups, strict=True)
    both = [(text.strip(), other.strip()) for text, group in each for other in group]
    found = [[numbers.setdefault(text, len(numbers)) for text in pair] for pair in both]
    pairs = np.array(found, np.int64).reshape(-1, 2)
    limit = limit_of(_WHERE, tokenizer, encoder.config, max_length)
    tokens = Tokens.of(_WHERE, tokenizer, list(numbers), limit)
    if tokens.cut:
        line = f"{len(tokens.cut):,} of {len(numbers):,} texts were cut off after {limit} tokens."
        warnings.warn(line, stacklevel=2)
    if isinstance(idf, bool):
        counted, of_each = tokens, np.bincount(pairs[:, 1], minlength=len(numbers))
    else:
        counted = Tokens.of(_WHERE, tokenizer, [text.strip() for text in idf], limit)
        of_each = np.ones(len(idf), np.int64)
    weights = np.ones(len(tokenizer) + 1)
    weights[[i for i in (tokenizer.cls_token_id, tokenizer.sep_token_id) if i is not None]] = 0
    if idf is not False:
        weights = idf_weights(counted, of_each, len(weights))

    # A text without tokens but special ones has nothing that could match.
    empty = tokens.lengths <= tokenizer.num_special_tokens_to_add()
    scored = np.flatnonzero(~empty[pairs].any(1))
    scores = np.zeros((len(pairs), 3))
    scores[scored] = _of_pairs(encoder, tokens, pairs[scored], weights, batch_tokens, progress)
    if len(pairs) > len(groups):
        sizes = [len(group) for group in groups]
        scores = np.maximum.reduceat(scores, np.cumsum([0, *sizes[:-1]]))
    scores = (scores - lowest) / (1 - lowest)
    dtype = torch.float64 if encoder.backbone.dtype == torch.float64 else torch.float32
    return BERTScore(*torch.from_numpy(scores).to(dtype).unbind(1))


def _groups(
    candidates: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
) -> list[list[str]]:
    """The references of each candidate, after a check that there is one."""
    expected = "a string or a list of strings for each candidate"
    check_texts(_WHERE, "candidates", candidates)
    check_texts(_WHERE, "references", references, expected, str | list | tuple)
    got = f"{len(references)} for {len(candidates)} candidates"
    check(len(candidates) == len(references), _WHERE, "references", got, expected)
    groups = [[group] if isinstance(group, str) else list(group) for group in references]
    for number, group in enumerate(groups):
        got, fix = f"none for candidate {number}", "Leave the candidate out."
        check(len(group) > 0, _WHERE, "references", got, "one at least for each candidate", fix)
        check_texts(_WHERE, "references", group)
    return groups


def _of_pairs(
    encoder: Encoder,
    tokens: Tokens,
    pairs: np.ndarray,
    weights: np.ndarray,
    batch_tokens: int,
    progress: bool,
) -> np.ndarray:
    """Precision, recall and F1, fp64 [P, 3], of pairs of texts that have tokens.

    ``pairs``, int64 [P, 2], are numbers of a candidate and a reference, and ``weights``, fp64 [V],
    those of each token of the vocabulary.
    """
    lengths = tokens.lengths
    last = np.zeros(len(lengths), np.int64)  # the last pair of each text
    np.maximum.at(last, pairs, np.arange(len(pairs))[:, None])
    total = int(lengths[np.unique(pairs)].sum())
    states: dict[int, Tensor] = {}
    scores = [np.zeros((0, 3))]
    with encoder.ready(), progress_bar(total, _WHERE, progress) as bar:
        for start, end in cuts(lengths[pairs].sum(1), _PAIR_TOKENS):
            chunk = pairs[start:end]
            new = np.array([i for i in np.unique(chunk).tolist() if i not in states], np.int64)
            for texts in batches(lengths[new], batch_tokens):
                (rows,) = encoder(tokens.batch(new[texts], encoder.config.pad_token_id or 0))
                parts = rows.split(lengths[new[texts]].tolist())
                states.update(zip(new[texts].tolist(), parts, strict=True))
                bar.update(len(rows))
            scores.append(_scores(chunk, states, tokens, weights))
            states = {i: states[i] for i in states if last[i] >= end}
            for i in states.keys() & set(new.tolist()):
                states[i] = states[i].clone()  # as those of a batch share their memory
    return np.concatenate(scores)


def _scores(
    pairs: np.ndarray, states: dict[int, Tensor], tokens: Tokens, weights: np.ndarray
) -> np.ndarray:
    """The same of some pairs, with the states [T, E] of their texts."""
    rows, ends, sizes = [], [], []
    for texts in pairs.T:
        size = tokens.lengths[texts]
        rows.append(torch.cat([states[i] for i in texts.tolist()]))
        ends.append(torch.from_numpy(offsets_of(size, np.int32)).to(rows[-1].device))
        sizes.append(size)
    longest = [int(size.max()) for size in sizes]
    match = ops.maxsim(rows[0], rows[1], ends[0], ends[1], longest[0], longest[1])

    def mean(texts: np.ndarray, size: np.ndarray, score: Tensor) -> np.ndarray:
        pair = np.repeat(np.arange(len(pairs)), size)
        weight = weights[tokens.ids[tokens.places(texts)]]
        total = np.bincount(pair, weight * score.cpu().numpy(), len(pairs))
        norm = np.bincount(pair, weight, len(pairs))
        return np.divide(total, norm, out=np.zeros_like(total), where=norm > 0)

    precision = mean(pairs[:, 0], sizes[0], match.query_score)
    recall = mean(pairs[:, 1], sizes[1], match.key_score)
    both = precision + recall
    f1 = np.divide(2 * precision * recall, both, out=np.zeros_like(both), where=both != 0)
    return np.stack([precision, recall, f1], 1)


def idf_weights(tokens: Tokens, of_each: np.ndarray, vocab_size: int) -> np.ndarray:
    """The inverse document frequency of each token, fp64 [vocab_size].

    The texts are distinct, and ``of_each``, int64 [texts], says how many documents each of them is.
    """
    text = np.repeat(np.arange(len(of_each)), tokens.lengths)
    once = np.unique(text * vocab_size + tokens.ids)
    counts = np.bincount(once % vocab_size, of_each[once // vocab_size], minlength=vocab_size)
    return np.log((of_each.sum() + 1) / (counts + 1))


def _baseline(given: str | Path | Sequence[float] | None, layer: int) -> np.ndarray:
    """fp64 [3]: precision, recall and F1 of unrelated texts."""
    if given is None:
        return np.zeros(3)
    if not isinstance(given, str | Path):
        values = np.array(given, np.float64)
        expected = "three numbers below 1, of precision, recall and F1, or a file"
        fits = values.shape == (3,) and bool((values < 1).all())
        check(fits, _WHERE, "baseline", given, expected, "Pass (0, 0, 0) for none.")
        return values
    rows = [re.split("[,\t]", line.strip()) for line in lines_of(Path(given)) if line.strip()]
    found = [row for row in rows[1:] if row[0].strip() == str(layer)]
    try:
        (values,) = np.array([row[1:] for row in found], np.float64)
        fits = values.shape == (3,) and bool((values < 1).all())
    except ValueError:
        fits = False
    got = f"{given}, without a line of layer {layer} and three numbers below 1"
    expected = "a header LAYER,P,R,F and a line for each layer"
    fix = "Choose a layer that it has, or another file."
    check(fits, _WHERE, "baseline", got, expected, fix, DataError)
    return values
