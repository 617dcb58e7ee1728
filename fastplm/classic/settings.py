"""The settings of ``fastplm classic``. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from fastplm.run.settings import COUNT, POSITIVE, Settings, common, setting, whole

#: The systems, and the sentences of a batch (of word2vec, those read at once).
SYSTEMS = {"elmo": 32, "skip-thoughts": 32, "quick-thoughts": 200, "word2vec": 10_000}
_WIDTH = whole(2, 2**16)
#: What a system does not read.
_UNREAD = {
    "skip-thoughts": ("layers",),
    "quick-thoughts": ("layers",),
    "word2vec": tuple(
        "layers embedding batch_size learning_rate save_every log_every threads".split()
    ),
}


@dataclass
class ClassicArguments(Settings):
    """The settings of a run; see ``fastplm classic --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "classic"

    system: str = setting(
        "elmo (a bidirectional language model over characters), skip-thoughts or quick-thoughts "
        "(sentence vectors from the sentences around), or word2vec (gensim's skip-gram)",
        choices=tuple(SYSTEMS),
    )
    corpus: Sequence[str | Path] = setting(
        "text files, plain or compressed, or folders of .txt files; blank lines between documents",
        path="PATH",
    )
    out: str | Path = common("out")
    steps: int | None = setting(
        "optimizer steps (default: 1000); of word2vec, passes over the text (default: 5)",
        None,
        number=COUNT,
    )
    batch_size: int | None = setting(
        "sentences of a batch (default: 32; 200 for quick-thoughts)", None, number=whole(2, 2**16)
    )
    vocab_size: int = setting("words of the vocabulary", 20_000, number=whole(5), metavar="N")
    hidden: int = setting("width of an LSTM or GRU; of word2vec's vectors", 512, number=_WIDTH)
    embedding: int = setting("width of a word's vector inside the model", 128, number=_WIDTH)
    layers: int = setting("layers of ELMo", 2, number=whole(1, 100))
    max_length: int = setting("most words of a sentence; the rest is left out", 40, number=whole(3))
    learning_rate: float = setting("peak learning rate of AdamW", 1e-3, number=POSITIVE)
    seed: int = common("seed", "seed of weights, order and dropout")
    save_every: int = common("save_every")
    log_every: int = common("log_every")
    threads: int | None = common("threads")
    resume: bool = common("resume")
    overwrite: bool = common("overwrite")

    def __post_init__(self) -> None:
        self.check_values()
        for each in fields(self):
            unread = each.name in _UNREAD.get(self.system, ())
            given = getattr(self, each.name) != each.default
            expected = f"nothing with {self.system}, which does not read it"
            self.check(each.name, not (unread and given), expected, "Leave the option out.")
        self.batch_size = self.batch_size or SYSTEMS[self.system]
        self.steps = self.steps or (5 if self.system == "word2vec" else 1000)
        # An LSTM's states are projected to the width of a word's vector, which is smaller.
        fix = "Give a smaller --embedding, too."
        expected = f"more than --embedding, which is {self.embedding}"
        self.check("hidden", self.system != "elmo" or self.hidden > self.embedding, expected, fix)
        # A sentence's neighbours must be told from one other sentence at least.
        many = self.system != "quick-thoughts" or self.batch_size > 2
        self.check("batch_size", many, "3 or more sentences with quick-thoughts", "Raise it.")
        able, expected = self.resumable or not self.resume, "a system that is trained in steps"
        fix = "Start it again: it has no checkpoints."
        self.check("resume", able, expected, fix, "word2vec")

    @property
    def resumable(self) -> bool:
        return self.system != "word2vec"
