"""The metrics of fine-tuning: of labels, scores, entities, answers and texts."""

from __future__ import annotations

import math
import operator
import re
import statistics
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

#: A tag that says where an entity begins, goes on and ends, and of which kind it is.
_TAG = re.compile(r"O|[BIES]-.+")
ENTITY_SCORES = ("f1", "precision", "recall")


def accuracy(found: Sequence[Any], right: Sequence[Any]) -> float:
    """The share of the answers that are right."""
    return sum(map(operator.eq, found, right)) / len(right)


def f1(found: Sequence[int], right: Sequence[int], classes: int) -> float:
    """F1 of class 1 if there are two classes, else the mean of all classes' F1."""
    values = []
    for label in [1] if classes == 2 else range(classes):
        hits = sum(a == b == label for a, b in zip(found, right, strict=True))
        said = sum(a == label for a in found) + sum(b == label for b in right)
        values.append(2 * hits / said if said else 0.0)
    return sum(values) / len(values)


def matthews(found: Sequence[int], right: Sequence[int]) -> float:
    """Matthews' correlation of two or more classes; 0 if all answers or all targets are one class.

    ``(c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))`` with s examples, c
    right answers, and p_k answers and t_k targets of class k.

    Source: Gorodkin 2004, "Comparing two K-category assignments by a K-category correlation
    coefficient"; for two classes Matthews 1975.
    """
    count, said, true = len(right), Counter(found), Counter(right)
    hits = sum(map(operator.eq, found, right))
    above = hits * count - sum(said[label] * true[label] for label in true)
    below = math.prod(count**2 - sum(n**2 for n in each.values()) for each in (said, true))
    return above / math.sqrt(below) if below else 0.0


def pearson(found: Sequence[float], right: Sequence[float]) -> float:
    """Pearson's correlation; 0 if one of the two is constant, where it is not defined."""
    try:
        return statistics.correlation(found, right)
    except statistics.StatisticsError:
        return 0.0


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values have the mean of their ranks.

    Pearson's correlation of the ranks is Spearman's.
    """
    places: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(rank)
    return [statistics.fmean(places[value]) for value in values]


def normalized(answer: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces.

    Source: Rajpurkar et al. 2016 (arXiv 1606.05250), §6.1 and the evaluation script.
    """
    answer = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def exact_match(answer: str, right: str) -> float:
    """1 if the answers are the same once normalized."""
    return float(normalized(answer) == normalized(right))


def words_f1(answer: str, right: str) -> float:
    """F1 of the words that two answers have in common; 1 if both have no word."""
    found, wanted = normalized(answer).split(), normalized(right).split()
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0


def null_threshold(differences: Sequence[float], gains: Sequence[float]) -> float:
    """The threshold on the null score difference that gives the highest sum of scores.

    The null score difference is the score of "no answer" minus that of the best span. A question
    is answered if its difference is not above the threshold.

    Args:
        differences: the null score difference of each question.
        gains: what each question's score gains if it is answered.

    Returns:
        The lowest threshold with the highest sum: the difference of one of the questions, or 1 less
        than the lowest difference, so that no question is answered.

    Source: Devlin et al. 2019, §4.3; the evaluation script of SQuAD 2.0.
    """
    gain_at: dict[float, float] = {}
    for difference, gain in zip(differences, gains, strict=True):
        gain_at[difference] = gain_at.get(difference, 0.0) + gain
    total = most = 0.0
    threshold = min(differences) - 1
    for difference in sorted(gain_at):
        total += gain_at[difference]
        if total > most:
            most, threshold = total, difference
    return threshold


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
