"""The pages, their blocks and commands, and the files that they name."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling
from fastplm.classic.sentences import QuickThoughtsModel, ThoughtsConfig
from fastplm.classic.words import Words
from fastplm.data import train_tokenizer
from fastplm.pretrain.presets import configuration

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "dev"),
    ]
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, and its lines."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^(```+)([^\n]*)\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)
    for match in fences:
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, match[2].strip(), match[3])


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^(```+)[^\n]*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block, as words."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = [block for page in PAGES for block in blocks(page)]


NOUNS = "river house teacher garden train letter window forest engine island".split()
VERBS = "follows carries remembers builds opens paints".split()


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} {VERBS[i * 5 % 6]} the {NOUNS[(i * 3 + 1) % 10]}"


def write_files(folder: Path) -> None:
    """Writes all files that pages name, and a cache of vocabularies."""
    stories = [". ".join(sentence(i + j) for j in range(4 + i % 7)) + "." for i in range(150)]
    (folder / "my-texts").mkdir()
    for name in ("wiki.txt", "my-texts/one.txt"):
        (folder / name).write_text("\n\n".join(stories))
    for name in ("captions.en.txt", "captions.de.txt"):
        (folder / name).write_text("\n".join(map(sentence, range(60))))
    labelled = [f"{'good' if i % 2 else 'bad'}\t{sentence(i)}" for i in range(20)]
    for name in ("reviews.tsv", "train.tsv", "test.tsv"):
        (folder / name).write_text("\n".join(("label\ttext", *labelled)))
    scored = [f"{i % 2 - 0.5}\t{sentence(i)}" for i in range(20)]
    (folder / "scores.tsv").write_text("\n".join(("score\ttext", *scored)))
    pairs = [f"{i % 2}\t1\t2\t{sentence(i)}\t{sentence(i + 6 * (i % 2))}" for i in range(20)]
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    (folder / "mrpc.txt").write_text("\n".join((head, *pairs)))
    tags = ("DET", "NOUN", "VERB", "DET", "NOUN")
    tagged = [zip(sentence(i).split(), tags, strict=True) for i in range(20)]
    (folder / "pos.tsv").write_text(
        "\n\n".join("\n".join("\t".join(pair) for pair in words) for words in tagged)
    )
    paragraphs = []
    for i in range(10):
        answer = {"text": NOUNS[i], "answer_start": sentence(i).index(NOUNS[i])}
        question = {"id": str(i), "question": "what is there?", "answers": [answer]}
        paragraphs.append({"context": sentence(i), "qas": [question]})
    squad = {"data": [{"title": "", "paragraphs": paragraphs}]}
    (folder / "squad.json").write_text(json.dumps(squad))
    questions = [
        {"question": f"what {VERBS[i % 6]}?", "choices": NOUNS[:3], "answer": i % 3}
        for i in range(20)
    ]
    words = {"good": ["house", "garden"], "bad": ["river"]}
    prompt = {"template": "{text} a {label}.", "labels": words}
    (folder / "prompt.json").write_text(json.dumps(prompt))
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    # The vocabulary is as large as BERT's, as the README has one of BERT's token ids.
    tokenizer = train_tokenizer(stories, 120, folder / "cache")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    # Models of the Hugging Face Hub are folders here, which Transformers looks for first.
    public = ("google-bert/bert-base-uncased", "distilbert/distilbert-base-uncased")
    for name in ("path/to/bert", "path/to/model", *public):
        transformers.BertForMaskedLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    pieces = train_tokenizer(stories, 400, folder / "cache", "unigram")
    t5 = configuration("t5-tiny", vocab_size=len(pieces), tokenizer=pieces)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(folder / "google-t5/t5-small")
    pieces.save_pretrained(folder / "google-t5/t5-small")
    shutil.copytree(folder / "google-t5/t5-small", folder / "path/to/t5")
    letters = train_tokenizer(stories, 400, folder / "cache", "bytelevel")
    bart = configuration("bart-tiny", vocab_size=len(letters), tokenizer=letters)
    transformers.BartForConditionalGeneration(bart).save_pretrained(folder / "path/to/bart")
    letters.save_pretrained(folder / "path/to/bart")
    gpt2 = configuration("gpt2-tiny", vocab_size=len(letters), tokenizer=letters)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(folder / "path/to/gpt2")
    letters.save_pretrained(folder / "path/to/gpt2")
    part = {"is_decoder": True, "add_cross_attention": True}
    decoder = transformers.BertConfig(**{**config.to_dict(), "vocab_size": len(letters), **part})
    both = transformers.EncoderDecoderModel(
        encoder=transformers.BertModel(config), decoder=transformers.BertLMHeadModel(decoder)
    )
    both.generation_config.decoder_start_token_id = letters.bos_token_id
    both.save_pretrained(folder / "path/to/bert2bert")
    tokenizer.save_pretrained(folder / "path/to/bert2bert")
    letters.save_pretrained(folder / "path/to/bert2bert/target_tokenizer")
    written = [f"{sentence(i)}\t{NOUNS[i % 10]}" for i in range(20)]
    (folder / "articles.tsv").write_text("\n".join(("document\tsummary", *written)))
    for name in (f"{split}.{side}.gz" for split in ("train", "test") for side in ("en", "de")):
        lines = "".join(f"{sentence(i)}\n" for i in range(20))
        (folder / name).write_bytes(gzip.compress(lines.encode()))
    words = Words.train(stories, 40)
    for name, model in (
        ("elmo", ElmoForLanguageModeling(ElmoConfig(vocab_size=len(words)))),
        ("quick", QuickThoughtsModel(ThoughtsConfig(vocab_size=len(words)))),
    ):
        model.save_pretrained(folder / "path/to" / name)
        words.save_pretrained(folder / "path/to" / name)
    sentences = [sentence(i) for i in range(6)]
    (folder / "sentences.txt").write_text("\n".join(sentences))
    (folder / "pairs.tsv").write_text("\n".join(f"{text}\t{text}" for text in sentences))
    pair = {"UID": "order", "linguistics_term": "order", "field": "syntax"}
    pair |= {"sentence_good": sentences[0], "sentence_bad": sentences[1]}
    (folder / "pairs.jsonl").write_text(json.dumps(pair))
    with zipfile.ZipFile(folder / "blimp.zip", "w") as archive:
        archive.writestr("data/order.jsonl", json.dumps(pair))
    (folder / "models_summary.jsonl").write_text(json.dumps({"UID": "order", "lstm": 0.7}))
    page = (ROOT / "docs/studies.md").read_text(encoding="utf-8")
    (folder / "grid.yaml").write_text(page.split("```text\n")[1].split("```")[0])
    for name, source in {
        "text/books-10m.train.txt.gz": "train.en.gz",
        "sentiment/movie.train.tsv": "scores.tsv",
        "sentiment/movie.dev.tsv": "scores.tsv",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / source, folder / name)
    # The files of benchmarks/finetuning.py and benchmarks/distillation.py.
    for name, source in {
        "sentiment/movie.train.tsv": "scores.tsv",
        "sentiment/movie.test.tsv": "scores.tsv",
        "pairs/mrpc.train.txt": "mrpc.txt",
        "pairs/mrpc.test.txt": "mrpc.txt",
        "tagging/ewt-pos.dev.tsv": "pos.tsv",
        "tagging/ewt-pos.test.tsv": "pos.tsv",
        "qa/xquad.en.json": "squad.json",
        "choice/commonsenseqa.train.jsonl": "questions.jsonl",
        "choice/commonsenseqa.dev.jsonl": "questions.jsonl",
        "text/wikitext-2.valid.txt": "wiki.txt",
        "text/wikitext-2.test.txt": "wiki.txt",
        **{
            f"translation/multi30k.{split}.{side}.gz": f"{split}.{side}.gz"
            for split in ("train", "test")
            for side in ("en", "de")
        },
    }.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / source, path)
