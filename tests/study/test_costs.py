"""What cells cost, before they run."""

from __future__ import annotations

from fastplm.study import costs

from .conftest import changed, plan_of


def test_a_mixture_depends_on_its_files_and_costs_what_they_hold(place):
    """The files may have spaces in their names. Before, such a one was not in the key, and a study
    with a mixture read the YAML as a table and stopped."""
    rows = "source\ttarget\n" + "a b c\td e\n" * 30
    (place / "first part.tsv").write_text(rows)
    (place / "second.tsv").write_text(rows)
    parts = '{first: {data: "first part.tsv", prefix: "one: "}, second: {data: second.tsv}}'
    (place / "tasks.yaml").write_text(parts)
    for before, after in (
        ("arch: bert-tiny", "arch: t5-tiny"),
        ("objective: mlm", "objective: spans"),
        ("mlm_probability: 0.15, ", ""),
        ("mlm_probability: 0.40, ", ""),
        ("{task: classification, data: train.tsv}", "{task: seq2seq, data: tasks.yaml}"),
    ):
        changed(place, before, after)

    def found():
        costs._counted.cache_clear()
        return plan_of().variants["40 %"].evaluations["sentiment", 1.0][0]

    old = found()
    assert old.cost > 0
    for name in ("first part.tsv", "second.tsv"):  # cut to 128 tokens, as fine-tuning does
        (place / name).write_text(rows.replace("a b c", "a b c " * 100))
    at_most = found().cost
    for name in ("first part.tsv", "second.tsv"):
        (place / name).write_text(rows.replace("a b c", "a b c " * 400))
    assert found().cost == at_most > old.cost
    (place / "first part.tsv").write_text(rows)
    old = found()
    (place / "first part.tsv").write_text(rows.replace("d e", "e d"))
    assert found().key != old.key
