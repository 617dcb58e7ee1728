"""The settings of ``fastplm classic``. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastplm.run.settings import COUNT, POSITIVE, Rule, Settings, common, integer, setting

if TYPE_CHECKING:
    from typing_extensions import Self

#: The systems, and the sentences of a batch (of word2vec, those read at once).
SYSTEMS = {"elmo": 32, "skip-thoughts": 32, "quick-thoughts": 200, "word2vec": 10_000}
_WIDTH = integer(2, 2**16)
#: What a system does not read.
_UNREAD = {
    "skip-thoughts": ("layers",),
    "quick-thoughts": ("layers",),
    "word2vec": tuple(
        "layers embedding batch_size learning_rate save_every log_every threads".split()
    ),
}


@dataclass(frozen=True)
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
        "text files, plain or compressed, or folders of .txt files, with blank lines between "
        "documents; or tables, as pretrain reads them",
        path="PATH",
    )
    out: str | Path = common("out")
    steps: int | None = setting(
        "optimizer steps (default: 1000); of word2vec, passes over the text (default: 5)",
        None,
        number=COUNT,
    )
    batch_size: int | None = setting(
        "sentences of a batch (default: 32; 200 for quick-thoughts)", None, number=integer(2, 2**16)
    )
    vocab_size: int = setting(
        "words of the vocabulary",
        20_000,
        number=integer(5),
    )
    hidden: int = setting("width of an LSTM or GRU; of word2vec's vectors", 512, number=_WIDTH)
    embedding: int = setting("width of a word's vector inside the model", 128, number=_WIDTH)
    layers: int = setting("layers of ELMo", 2, number=integer(1, 100))
    max_length: int = setting(
        "most words of a sentence; the rest is left out", 40, number=integer(3)
    )
    learning_rate: float = setting(
        "peak learning rate of AdamW", 1e-3, number=POSITIVE, also={"lr": None}
    )
    seed: int = common("seed", "seed of weights, order and dropout")
    save_every: int = common("save_every")
    log_every: int = common("log_every")
    threads: int | None = common("threads")
    resume: bool = common("resume")
    overwrite: bool = common("overwrite")

    rules = (
        # An LSTM's states are projected to the width of a word's vector, which is smaller.
        Rule(
            "hidden",
            lambda args: args.system != "elmo" or args.hidden > args.embedding,
            "more than --embedding, which is {args.embedding}",
            fix="Give a smaller --embedding, too.",
        ),
        # A sentence's neighbours must be told from one other sentence at least.
        Rule(
            "batch_size",
            lambda args: args.system != "quick-thoughts" or args.batch_size > 2,
            "3 or more sentences with quick-thoughts",
            fix="Raise it.",
        ),
        Rule(
            "resume",
            lambda args: args.resumable or not args.resume,
            "a system that is trained in steps",
            "system",
            "Start it again: it has no checkpoints.",
        ),
    )

    def resolved(self) -> Self:
        for name in _UNREAD.get(self.system, ()):
            expected = f"nothing with {self.system}, which does not read it"
            self.check(name, self.is_default(name), expected, "Leave the option out.")
        plan = self.changed(
            batch_size=self.batch_size or SYSTEMS[self.system],
            steps=self.steps or (5 if self.system == "word2vec" else 1000),
        )
        return plan.checked()

    @property
    def resumable(self) -> bool:
        return self.system != "word2vec"
