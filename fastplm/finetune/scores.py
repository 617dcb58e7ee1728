"""Scores that are more than a count of right answers: entities, and texts with several targets."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: A tag that says where an entity begins, goes on and ends, and of which kind it is.
_TAG = re.compile(r"O|[BIES]-.+")
ENTITY_SCORES = ("f1", "precision", "recall")


def mark_entities(tags: Sequence[str]) -> bool:
    """Whether tags are those of entities: ``O``, ``B-PER``, ``I-PER``; ``E-`` and ``S-``, too."""
    return all(map(_TAG.fullmatch, tags)) and any(tag != "O" for tag in tags)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """The entities of a sentence: (kind, first word, last word).

    An entity begins at ``B-`` or ``S-``, and at ``I-`` or ``E-`` that does not continue one of its
    kind, as a model may leave the beginning out. It ends before ``O`` and where another begins.

    Source: the definition of CoNLL's conlleval and of the default mode of the package seqeval.
    """
    found = set()
    begin, kind, before = 0, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, this = tag.partition("-")
        begins = prefix in "BS" or (prefix in "IE" and (this != kind or before in "ES"))
        if kind and (begins or prefix == "O"):
            found.add((kind, begin, place - 1))
            kind = ""
        if begins:
            begin, kind = place, this
        before = prefix
    return found


def entity_scores(
    found: Sequence[Sequence[str]], right: Sequence[Sequence[str]]
) -> dict[str, float]:
    """F1, precision and recall of entities: right are those of the right kind and both ends.

    They are counted over all sentences (the micro mean); a share of no entities is 0.

    Args:
        found, right: the tags of each sentence.

    Source: Tjong Kim Sang and De Meulder 2003, "Introduction to the CoNLL-2003 Shared Task".
    """
    hits = said = true = 0
    for tags, targets in zip(found, right, strict=True):
        ours, theirs = entities(tags), entities(targets)
        hits, said, true = hits + len(ours & theirs), said + len(ours), true + len(theirs)
    return {
        "f1": 2 * hits / (said + true) if said + true else 0.0,
        "precision": hits / said if said else 0.0,
        "recall": hits / true if true else 0.0,
    }


def text_scores(
    written: Sequence[str], references: Sequence[Sequence[str]], *, stemmer: bool = False
) -> dict[str, float]:
    """BLEU and chrF of a corpus (sacreBLEU), the mean F1 of ROUGE-1, -2 and -Lsum, and the share
    of texts that are one of their references; all in percent.

    BLEU and chrF read all references of a text; of ROUGE each text has that of the reference which
    gives it the most.

    Args:
        written: what a model wrote.
        references: one or several for each.
        stemmer: whether ROUGE compares the stems of words (Porter 1980).

    Source: Papineni et al. 2002; Popović 2015; Lin 2004; Post 2018 (arXiv 1804.08771).
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = RougeScorer(names, use_stemmer=stemmer)
    rouge = dict.fromkeys(names, 0.0)
    for text, right in zip(written, references, strict=True):
        for name, score in scorer.score_multi(right, text).items():
            rouge[name] += 100 * score.fmeasure / len(written)
    # sacreBLEU reads the first reference of all texts, then the second: None where there is none.
    most = max(map(len, references))
    columns = [[r[i] if i < len(r) else None for r in references] for i in range(most)]
    same = [text.strip() in right for text, right in zip(written, references, strict=True)]
    return {
        "bleu": sacrebleu.corpus_bleu(written, columns).score,
        "chrf": sacrebleu.corpus_chrf(written, columns).score,
        **rouge,
        "exact_match": 100 * sum(same) / len(same),
    }
