"""What the tests of a pre-training share."""

from __future__ import annotations

import pytest
import torch
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastplm.cli import _parser
from fastplm.data import pairs
from fastplm.pretrain.presets import FAMILIES, PRESETS
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run.flops import flops_a_token
from fastplm.testing import FORWARD_FACTOR, check_error

from ..commands import rules_of_this_machine as measured  # noqa: F401

#: Sizes that leave some tokens to learn beside bytes, or beside letters and a hundred sentinels.
VOCABULARIES = {"wordpiece": 120, "bytelevel": 300, "unigram": 200}


@pytest.fixture(scope="session")
def short_run(run):
    """A run of a family's tiny model, with its kind of vocabulary."""

    def short_run(out, arch, **options):
        kind = FAMILIES[PRESETS[arch].family].tokenizer
        return run(out, arch=arch, **{"vocab_size": VOCABULARIES[kind], **options})

    return short_run


@pytest.fixture(scope="session")
def words(corpus, word_tokenizer):
    """A tokenizer of the corpus' words with so many sentinels."""
    found = sorted(set(corpus.read_text().replace(".", " . ").split()))

    def words(sentinels):
        special = ["<unk>", "<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(sentinels))]
        return word_tokenizer(special + found, pad_token="<pad>", eos_token="</s>")

    return words


def with_ends(store, eos_token_id):
    """All documents of a store, each followed by its end."""
    ids = []
    for first, last in zip(store.documents[:-1], store.documents[1:], strict=True):
        ids += store.tokens[store.sentences[first] : store.sentences[last]].tolist()
        ids.append(eos_token_id)
    return ids


def scalars(out, tag="train/loss"):
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def check_logged(out, loss):
    """Checks that a loss is that of the log, up to a rounding."""
    gold = torch.tensor(loss, dtype=torch.float64)
    check_error("loss", out, gold, [gold.float()], FORWARD_FACTOR)


@pytest.fixture
def settings(arguments):
    """The settings of a command line."""

    def settings(out, **options):
        found = vars(_parser().parse_args(arguments(out, **options)))
        found.pop("command")
        return PretrainArguments(**found).plan()

    return settings


def flops_of(metrics, out, folder="model"):
    """The FLOPs of a step of full samples, or of the mean pairs."""
    config = transformers.AutoConfig.from_pretrained(out / folder)
    args = metrics["arguments"]
    masked, length = args["mlm_probability"] or 0.15, args["block_size"]
    if args["objective"] in ("mlm+nsp", "mlm+sop"):
        length = pairs.NextSentencePairs.expected_length(length)
    return args["batch_size"] * length * flops_a_token(config, round(length), masked=masked)
