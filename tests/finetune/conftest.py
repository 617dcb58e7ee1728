"""What the tests of fine-tuning share: tiny checkpoints, a file of each task, and settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from fastplm import _extension
from fastplm.data import train_tokenizer
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import TASKS

from ..commands import rules_of_this_machine as measured  # noqa: F401

needs_csrc = pytest.mark.skipif(
    _extension.lacks("dropout_rows", "CPU") is not None, reason="csrc/ is not there"
)
NOUNS = "river house teacher garden train letter window forest engine island".split()
VERBS = "follows carries remembers builds opens paints".split()
TAGS = {"the": "DET", **dict.fromkeys(NOUNS, "NOUN"), **dict.fromkeys(VERBS, "VERB")}
COUNT = 60
#: Families whose tokenizers here have a token for each letter.
LETTERS = ("gpt", "gpt2")


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} {VERBS[i * 5 % 6]} the {NOUNS[(i * 3 + 1) % 10]}"


def classification() -> str:
    rows = (
        f"{-1 if 'opens' in sentence(i) else 1}\t{sentence(i)}{' again' * (i % 5)}"
        for i in range(COUNT)
    )
    return "\n".join(("label\ttext", *rows)) + "\n"


def regression() -> str:
    rows = (
        f"{sentence(i)}\t{sentence(i + i % 3)}{' again' * (i % 5)}\t{(4.75, 0.5, 2.625)[i % 3]}"
        for i in range(COUNT)
    )
    return "\n".join(("sentence1\tsentence2\tscore", *rows)) + "\n"


def pair() -> str:
    rows = (f'{i % 2},"{sentence(i)}",{sentence(i + 6 * (i % 2))}' for i in range(COUNT))
    return "\r\n".join(("Label,sentence1,sentence2", *rows)) + "\r\n"


def tagging() -> str:
    lengths = (4 if i % 3 else 8 for i in range(COUNT))
    sentences = ((sentence(i).split() * 2)[:length] for i, length in enumerate(lengths))
    return "\n\n".join("\n".join(f"{w}\t{TAGS[w]}" for w in words) for words in sentences)


def qa() -> str:
    paragraphs = []
    for i in range(COUNT // 2):
        context = f"{sentence(i)}. then {sentence(i + 1)}."
        questions = []
        for j in range(2):
            noun = sentence(i + j).split()[1]
            verb = sentence(i + j).split()[2]
            answers = [{"text": noun, "answer_start": context.index(noun)}]
            questions.append({"id": f"{i} {j}", "question": f"what {verb}?", "answers": answers})
        paragraphs.append({"context": context, "qas": questions})
    return json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}, indent=1)


def choice() -> str:
    lines = []
    for i in range(COUNT):
        texts = [NOUNS[(i + j) % 10] for j in range(3)]
        question: object = f"what is a {texts[i % 3]}?"
        line = {"question": question, "choices": texts, "answer": i % 3}
        if i % 2:
            choices = [{"label": a, "text": b} for a, b in zip("ABC", texts, strict=True)]
            line = {"question": {"stem": question, "choices": choices}, "answerKey": "ABC"[i % 3]}
        lines.append(json.dumps(line))
    return "\n".join(lines)


FILES = {
    "classification": classification,
    "pair": pair,
    "regression": regression,
    "tagging": tagging,
    "qa": qa,
    "choice": choice,
}


def documents(count: int, least: int = 4) -> list[str]:
    """Documents of sentences that no other sentence of them is equal to."""
    return [
        " ".join(f"{sentence(i + j)} {i} {j}." for j in range(least + i % 7)) for i in range(count)
    ]


def letters() -> dict[str, str]:
    """A file of each task that a tokenizer of letters reads."""
    rows = [f"{'ab' * (i % 3 + 1)}\tcd{'e' * (i % 4)}\t{i % 2}" for i in range(24)]
    texts = [f"{'abc' * (i % 3 + 1)}\t{i % 2}" for i in range(24)]
    choices = [
        {"question": "ab", "choices": ["c", "de", "f" * (i % 5 + 1)], "answer": i % 3}
        for i in range(24)
    ]
    return {
        "pair": "\n".join(["text1\ttext2\tlabel", *rows]),
        "regression": "\n".join(["text1\ttext2\tscore", *(f"{row}.5" for row in rows)]),
        "classification": "\n".join(["text\tlabel", *texts]),
        "choice": "\n".join(map(json.dumps, choices)),
    }


#: Of the encoders: Transformers' class, and what differs from the others' configurations.
ENCODERS = {
    "bert": ("BertForPreTraining", {}),
    "deep": ("BertModel", {"num_hidden_layers": 4}),
    "poolerless": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", {"max_position_embeddings": 132}),
    "electra": ("ElectraModel", {"embedding_size": 16}),
    "albert": ("AlbertForPreTraining", {"embedding_size": 16}),
    "albert-mlm": ("AlbertForMaskedLM", {"embedding_size": 16}),
}


def encoder(name: str, cache: Path) -> tuple:
    texts = [f"{sentence(i)}. then what is a again?" for i in range(COUNT)]
    tokenizer = train_tokenizer(texts, 70, cache)
    kind, others = ENCODERS[name]
    kind = getattr(transformers, kind)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2}
    return tokenizer, kind(kind.config_class(vocab_size=len(tokenizer), **sizes | others))


def gpt2() -> tuple:
    names = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=len(names), bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2Tokenizer(vocab=vocabulary, merges=[]), transformers.GPT2Model(config)


def gpt() -> tuple:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {name: index for index, name in enumerate(names)}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = transformers.OpenAIGPTConfig(vocab_size=len(names), **sizes)
    tokenizer = transformers.OpenAIGPTTokenizer(vocab=vocabulary, merges=[])
    return tokenizer, transformers.OpenAIGPTModel(config)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """A function that makes a tiny checkpoint and its tokenizer, once.

    The tokenizers of GPT and GPT-2 have no token for the ends of a text.
    """
    folder = tmp_path_factory.mktemp("checkpoints")

    def build(name: str) -> Path:
        path = folder / name
        if not path.is_dir():
            torch.manual_seed(len(name))
            made = {"gpt": gpt, "gpt2": gpt2}.get(name)
            tokenizer, model = made() if made else encoder(name, folder / "cache")
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    return build


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    """A file of each task; those for a tokenizer of letters are ``letters pair`` …"""
    folder = tmp_path_factory.mktemp("files")
    texts = {task: make() for task, make in FILES.items()}
    texts |= {f"letters {task}": text for task, text in letters().items()}
    texts["seq2seq"] = "source\ttarget\na\tb\nc\td\n"
    texts["text"] = "\n\n".join(documents(40))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8-sig", newline="")
    return {name: folder / name for name in texts}


def copied(path: Path) -> Path:
    """The training examples in another file, as the same one is refused to evaluate on."""
    return Path(shutil.copy(path, path.with_name(f"copied-{path.name}")))


@pytest.fixture
def arguments(checkpoint, files, tmp_path):
    """The settings of a short run, with changes."""

    def build(
        task: str, model: str | Path = "bert", out: str = "out", **options: object
    ) -> FinetuneArguments:
        data = "text" if TASKS[task].running_text else task
        settings = {
            "model": checkpoint(model) if isinstance(model, str) else model,
            "data": files.get(f"letters {data}" if model in LETTERS else data, files[data]),
            "out": tmp_path / out,
            "batch_size": 4,
            "learning_rate": 1e-3,
            "log_every": 1,
            "steps": 3,
            "precision": "fp32",
            **options,
        }
        return FinetuneArguments(task=task, **settings).plan()

    return build


GERMAN = {
    **{"small": "kleiner", "big": "großer", "red": "roter", "cat": "Kater", "dog": "Hund"},
    **{"man": "Mann", "sits": "sitzt", "runs": "läuft", "mat": "Teppich", "road": "Weg"},
    **{"hill": "Hügel", "a": "ein", "the": "dem", "on": "auf"},
}
SOURCES = [
    f"a {size} {who} {does} on the {place}"
    for size in ("small", "big", "red")
    for who in ("cat", "dog", "man")
    for does in ("sits", "runs")
    for place in ("mat", "road", "hill")
]
TARGETS = [" ".join(GERMAN[word] for word in source.split()) for source in SOURCES]
_BART = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 128))
}
#: Of the models that write texts: kind of tokenizer, class and configuration, without dropout.
WRITERS = {
    "bert": (
        "wordpiece",
        transformers.BertModel,
        dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
    ),
    "bart": (
        "bytelevel",
        transformers.BartForConditionalGeneration,
        dict(
            d_model=64,
            max_position_embeddings=64,
            dropout=0.0,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            **_BART,
        ),
    ),
    "gpt2": (
        "bytelevel",
        transformers.GPT2LMHeadModel,
        dict(
            n_embd=64,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=2,
            eos_token_id=2,
        ),
    ),
    "t5": (
        "unigram",
        transformers.T5ForConditionalGeneration,
        dict(
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
    ),
}
#: Ways to start a model, as options of the command.
STARTS = {
    "t5": {"model": "t5", "prefix": "the red "},
    "bart": {"model": "bart"},
    "bert2bert": {"encoder": "bert", "target_vocab_size": 320},
    "rnd2gpt": {"encoder": "bert", "decoder": "gpt2", "warm": "decoder"},
    "bertshare": {"encoder": "bert", "share": True},
    "new source": {"model": "bart", "source_encoder_layers": 1, "source_vocab_size": 320},
}


@pytest.fixture(scope="session")
def writers(tmp_path_factory) -> Path:
    """A folder with ``WRITERS`` and their tokenizers, and files of sources and targets."""
    path = tmp_path_factory.mktemp("writers")
    (path / "sources.txt").write_text("\n".join(SOURCES) + "\n")
    (path / "targets.txt").write_text("\n".join(TARGETS) + "\n")
    rows = (f"{s}\t{t}" for s, t in zip(SOURCES, TARGETS, strict=True))
    (path / "pairs.tsv").write_text("\n".join(("source\ttarget", *rows)) + "\n")
    torch.manual_seed(7)  # a run's own seed would give its new weights these values
    for name, (tokens, kind, sizes) in WRITERS.items():
        tokenizer = train_tokenizer(SOURCES + TARGETS, 400, path / "cache", tokens)
        if name == "gpt2":  # like GPT-2's own tokenizer, it adds no token and cannot pad
            bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
            pairs = [tuple(pair) for pair in bpe["merges"]]
            ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
            tokenizer = transformers.GPT2Tokenizer(vocab=bpe["vocab"], merges=pairs, **ends)
        tokenizer.save_pretrained(path / name)
        config = kind.config_class(vocab_size=len(tokenizer), **sizes)
        kind(config).save_pretrained(path / name)
    return path


@pytest.fixture
def writing(writers, tmp_path):
    """The settings of a short run that learns to write texts, with changes."""

    def build(start: str = "bart", name: str = "run", **changes: object) -> FinetuneArguments:
        settings = {
            key: writers / value if key in ("model", "encoder", "decoder") else value
            for key, value in STARTS[start].items()
        }
        settings |= {"data": writers / "pairs.tsv", "out": tmp_path / name, "task": "seq2seq"}
        settings |= {"max_length": 32, "max_target_length": 24, "learning_rate": 3e-3, "steps": 4}
        settings |= {"batch_size": 16, "log_every": 1, "beams": 2, "precision": "fp32"}
        return FinetuneArguments(**settings | changes).plan()

    return build


@pytest.fixture(scope="session")
def teacher(checkpoint, files, tmp_path_factory) -> Callable[[str], Path]:
    """A function that gives the folder of a model that was fine-tuned for a task, once."""
    out = tmp_path_factory.mktemp("teachers")
    known: dict[str, Path] = {}

    def build(task: str) -> Path:
        if task not in known:
            given = {"task": task, "data": files[task], "out": out / task, "precision": "fp32"}
            args = FinetuneArguments(model=checkpoint("deep"), steps=4, batch_size=8, **given)
            known[task] = Path(finetune(args)["seeds"][0]["model"])
        return known[task]

    return build
