"""ELMo: word vectors from the layers of a bidirectional language model over characters.

Source: Peters et al. 2018 (arXiv 1802.05365); Jozefowicz et al. 2016 (arXiv 1602.02410) for the
character convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from fastplm import ops
from fastplm.classic.words import BEGIN, END, PAD, SPECIAL_WORDS, UNK, Words, word_bytes
from fastplm.errors import check
from fastplm.nn._rows import IGNORE_INDEX

_SYMBOLS = 261


class ElmoConfig(PreTrainedConfig):
    """Configuration of ``ElmoForLanguageModeling``; the defaults are a tenth of the paper's size.

    Args:
        vocab_size: the words that are predicted; any word is read, by its characters.
        character_dim: width of the characters' embeddings.
        filters: (width, count) of each convolution over the characters.
        highways: highway layers after them.
        projection: P, the width of a token and of each direction of a layer.
        lstm_size: width of an LSTM's cell.
        layers: LSTMs of each direction.
        dropout: of what each layer reads.
    """

    model_type = "fastplm-elmo"

    vocab_size: int = 20_000
    character_dim: int = 16
    filters: list | tuple = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 128))
    highways: int = 1
    projection: int = 128
    lstm_size: int = 512
    layers: int = 2
    dropout: float = 0.1


@dataclass
class ElmoOutput(ModelOutput):
    """What ``ElmoForLanguageModeling`` returns.

    Args:
        loss: fp32 []: the mean cross-entropy of the next word and of the previous one, in nats.
        layers: a tuple of L + 1 tensors [B, T, 2 P]: the tokens, twice side by side, and then the
            states of each layer, forward and backward.
    """

    loss: Tensor | None = None
    layers: tuple[Tensor, ...] | None = None


class _Highway(nn.Module):
    """``g relu(W x) + (1 - g) x`` with ``g = sigmoid(V x)``: Srivastava et al. 2015."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.transform(x).relu() + (1 - gate) * x


class _CharacterEncoder(nn.Module):
    """Words int64 [U, 50] as bytes -> [U, P]."""

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_SYMBOLS, config.character_dim)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(config.character_dim, count, width) for width, count in config.filters
        )
        width = sum(count for _, count in config.filters)
        self.highways = nn.Sequential(*(_Highway(width) for _ in range(config.highways)))
        self.projection = nn.Linear(width, config.projection)

    def forward(self, characters: Tensor) -> Tensor:
        symbols = self.embedding(characters).transpose(1, 2)  # [U, C, 50]
        found = [convolution(symbols).amax(-1).relu() for convolution in self.convolutions]
        return self.projection(self.highways(torch.cat(found, -1)))


class ElmoForLanguageModeling(PreTrainedModel):
    """A language model in both directions, whose layers are word vectors.

    Each direction is a stack of LSTMs with projections, from the second on with a skip connection;
    the softmax over words is shared by both, as the characters are. Against the paper: cells are
    not clipped, the softmax is exact (``ops.linear_cross_entropy``), not sampled, and sentences
    begin with a state of zeros.

    Args:
        config: the sizes.

    Source: Peters et al. 2018 (arXiv 1802.05365), §3.
    """

    config_class = ElmoConfig
    base_model_prefix = ""

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__(config)
        width = config.projection
        self.characters = _CharacterEncoder(config)
        self.forward_layers, self.backward_layers = (
            nn.ModuleList(
                nn.LSTM(width, config.lstm_size, proj_size=width, batch_first=True)
                for _ in range(config.layers)
            )
            for _ in range(2)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.softmax = nn.Linear(width, config.vocab_size)
        self.post_init()

    def forward(
        self,
        characters: Tensor,
        words: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> ElmoOutput:
        """Read sentences.

        Args:
            characters: int64 [U, 50], the bytes of the batch's different words.
            words: int64 [B, T], the place of each word in them.
            attention_mask: int64 [B, T], 1 = word, 0 = padding, which is at the right.
            labels: int64 [B, T], each word's id in the vocabulary.
        """
        tokens = self.characters(characters)[words]  # [B, T, P]
        turned = _turned(attention_mask)
        ahead, back = [tokens], [_take(tokens, turned)]
        for states, layers in ((ahead, self.forward_layers), (back, self.backward_layers)):
            for layer in layers:
                out, _ = layer(self.dropout(states[-1]))
                states.append(out if len(states) == 1 else out + states[-1])
        back = [_take(states, turned) for states in back]
        sides = tuple(torch.cat(pair, -1) for pair in zip(ahead, back, strict=True))
        loss = None
        if labels is not None:
            # The state at t knows the words up to t, or from t on: it predicts the one beyond.
            within = attention_mask[:, 1:].bool()
            rows = torch.cat((ahead[-1][:, :-1], back[-1][:, 1:]))
            targets = torch.cat((labels[:, 1:], labels[:, :-1]))
            targets = targets.masked_fill(~torch.cat((within, within)), IGNORE_INDEX)
            rows, weight, bias = self.dropout(rows), self.softmax.weight, self.softmax.bias
            rows, targets = rows.flatten(0, 1), targets.flatten()
            loss = ops.linear_cross_entropy(rows, weight, targets, linear_bias=bias)
        return ElmoOutput(loss=loss, layers=sides)

    @torch.no_grad()
    def embed(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        """The states of all layers for each word: a list of [L + 1, words, 2 P].

        Args:
            sentences: lists of words; ``split_words`` makes them of a text.
        """
        got, expected = "a sentence without words", "one word at least in each"
        where, fix = type(self).__name__, "Leave it out."
        check(all(map(len, sentences)), where, "sentences", got, expected, fix)
        training = self.training
        self.eval()
        batch = batch_of_words(sentences)
        batch = {name: value.to(self.device) for name, value in batch.items()}
        layers = torch.stack(self(**batch).layers)
        self.train(training)
        return [layers[:, i, 1 : 1 + len(words)] for i, words in enumerate(sentences)]


def batch_of_words(
    sentences: Sequence[Sequence[str]], vocabulary: Words | None = None
) -> dict[str, Tensor]:
    """The inputs of ``ElmoForLanguageModeling``; with a vocabulary, its labels, too."""
    begin, end, pad = (SPECIAL_WORDS[index] for index in (BEGIN, END, PAD))
    length = max(map(len, sentences)) + 2
    rows = [[begin, *words, end, *[pad] * (length - 2 - len(words))] for words in sentences]
    places = {
        word: index for index, word in enumerate(dict.fromkeys(w for row in rows for w in row))
    }

    def table(number: Callable[[str], int]) -> Tensor:
        return torch.tensor([[number(word) for word in row] for row in rows], device="cpu")

    lengths = torch.tensor([[len(words) + 2] for words in sentences], device="cpu")
    mask = torch.arange(length, device="cpu") < lengths
    batch = {"characters": word_bytes([*places]), "words": table(places.__getitem__)}
    batch["attention_mask"] = mask.long()
    if vocabulary is not None:
        batch["labels"] = table(lambda word: vocabulary.ids.get(word, UNK))
    return batch


def _turned(mask: Tensor) -> Tensor:
    """int64 [B, T]: where each row is read when its words are turned round; padding stays."""
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = mask.sum(1, keepdim=True) - 1
    return torch.where(places <= last, last - places, places)


def _take(states: Tensor, places: Tensor) -> Tensor:
    return states.gather(1, places[..., None].expand_as(states))
