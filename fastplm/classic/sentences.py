"""Sentence vectors from the sentences around: Skip-thoughts and Quick-thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from fastplm import ops
from fastplm.classic.words import PAD, Words, split_words
from fastplm.nn._rows import IGNORE_INDEX


class ThoughtsConfig(PreTrainedConfig):
    """Configuration of both models.

    Args:
        vocab_size: words that are read, and written by the decoders.
        embedding_size: width of the words' embeddings.
        hidden_size: D, the width of a GRU.
    """

    model_type = "fastplm-thoughts"

    vocab_size: int = 20_000
    embedding_size: int = 256
    hidden_size: int = 512


@dataclass
class ThoughtsOutput(ModelOutput):
    """What both models return.

    Args:
        loss: fp32 [], in nats.
        vectors: [B, D] or, of ``QuickThoughtsModel``, [B, 2 D]: one for each sentence.
    """

    loss: Tensor | None = None
    vectors: Tensor | None = None


class _Encoder(nn.Module):
    """Words [B, T] -> the last state of a GRU [B, D]."""

    def __init__(self, config: ThoughtsConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size, padding_idx=PAD)
        self.gru = nn.GRU(config.embedding_size, config.hidden_size, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != PAD).sum(1).cpu()
        packed = pack_padded_sequence(
            self.embedding(ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.gru(packed)
        return last[0]


class _Thoughts(PreTrainedModel):
    config_class = ThoughtsConfig
    base_model_prefix = ""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.GRU):  # which Transformers leaves as the memory is
            module.reset_parameters()

    @torch.no_grad()
    def embed(self, texts: Sequence[str], words: Words) -> Tensor:
        """A vector for each text: ``vectors`` of the output.

        Args:
            texts: sentences.
            words: the vocabulary of the training.
        """
        training = self.training
        self.eval()
        ids = pad([words.encode(split_words(text)) for text in texts])
        vectors = self(ids.to(self.device)).vectors
        self.train(training)
        return vectors


class SkipThoughtsModel(_Thoughts):
    """A GRU encodes a sentence, and two more write the previous and the next one from its vector.

    The vector enters every gate of a decoder in every step, as a part of its input. The decoders
    share the encoder's word embeddings and have one softmax over words.

    Source: Kiros et al. 2015 (arXiv 1506.06726), §2, equations 5 to 9.
    """

    def __init__(self, config: ThoughtsConfig) -> None:
        super().__init__(config)
        self.encoder = _Encoder(config)
        width = config.embedding_size + config.hidden_size
        self.decoders = nn.ModuleList(
            nn.GRU(width, config.hidden_size, batch_first=True) for _ in range(2)
        )
        self.softmax = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        previous: Tensor | None = None,
        next: Tensor | None = None,
        **kwargs: Any,
    ) -> ThoughtsOutput:
        """Encode sentences; with their neighbours, the loss.

        Args:
            input_ids: int64 [B, T], ``<s>`` … ``</s>`` and padding.
            previous, next: int64 [B, T'], the sentences before and after; all padding where a
                sentence has none. The loss is the mean over all their words.
        """
        vectors = self.encoder(input_ids)
        rows, targets = [], []
        for decoder, ids in zip(self.decoders, (previous, next), strict=True):
            if ids is None:
                continue
            # Where no sentence has a neighbour there is one column, and nothing would be read.
            ids = F.pad(ids, (0, max(0, 2 - ids.shape[1])), value=PAD)
            read = self.encoder.embedding(ids[:, :-1])
            thought = vectors[:, None].expand(-1, read.shape[1], -1)
            states, _ = decoder(torch.cat((read, thought), -1))
            rows.append(states.flatten(0, 1))
            targets.append(ids[:, 1:].masked_fill(ids[:, 1:] == PAD, IGNORE_INDEX).flatten())
        loss = None
        if rows:
            weight, bias = self.softmax.weight, self.softmax.bias
            all_rows, words = torch.cat(rows), torch.cat(targets)
            loss = ops.linear_cross_entropy(all_rows, weight, words, linear_bias=bias)
        return ThoughtsOutput(loss=loss, vectors=vectors)


class QuickThoughtsModel(_Thoughts):
    """Two GRUs encode sentences, and a sentence's neighbours are to be told from all others.

    ``p(j | i)`` is the softmax over the other sentences j of the batch of ``f(s_i) . g(s_j)``; the
    loss is its cross-entropy with the sentences next to i. The vector of a sentence is
    ``[f(s); g(s)]``.

    Source: Logeswaran and Lee 2018 (arXiv 1803.02893), §3.
    """

    def __init__(self, config: ThoughtsConfig) -> None:
        super().__init__(config)
        self.f, self.g = _Encoder(config), _Encoder(config)
        self.post_init()

    def forward(
        self, input_ids: Tensor, begins: Tensor | None = None, **kwargs: Any
    ) -> ThoughtsOutput:
        """Encode sentences; with their order, the loss.

        Args:
            input_ids: int64 [B, T], ``<s>`` … ``</s>`` and padding; for the loss, as they follow
                each other in the text.
            begins: bool [B], True where a document begins.
        """
        first, second = self.f(input_ids), self.g(input_ids)
        loss = None if begins is None else neighbour_loss(first @ second.T, begins)
        return ThoughtsOutput(loss=loss, vectors=torch.cat((first, second), -1))


def neighbour_loss(scores: Tensor, begins: Tensor) -> Tensor:
    """The mean cross-entropy of each sentence's neighbours among the others of the batch.

    Args:
        scores: [B, B], of sentence i with candidate j.
        begins: bool [B], True where a document begins: that sentence is no neighbour of the one
            before.
    """
    linked = torch.diag_embed((~begins[1:]).float(), 1)
    linked = linked + linked.T
    scores = scores.float()
    itself = torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    logp = F.log_softmax(scores.masked_fill(itself, -torch.inf), -1).masked_fill(itself, 0.0)
    return -(logp * linked).sum() / linked.sum().clamp(min=1)


def pad(sentences: Sequence[Sequence[int]]) -> Tensor:
    """int64 [B, T] of sentences with a word at least."""
    return pad_sequence([torch.tensor(ids, device="cpu") for ids in sentences], True, PAD)
