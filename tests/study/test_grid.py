"""The file of a study: what it may hold, and what is said of what it may not."""

from __future__ import annotations

import re

import pytest
import yaml

from fastplm.cli import main
from fastplm.errors import ArgumentValueError
from fastplm.study.grid import STUDIES, read_grid, words_of

GRID = {
    "study": "masking",
    "pretrain": {
        "arch": "bert-tiny",
        "objective": "mlm",
        "corpus": "a.txt",
        "steps": 3,
        "lr": ["5.0e-4", "1.0e-3"],
        "seeds": 3,
    },
    "finetune": {"seeds": 2},
    "variants": {"15 %": {"mlm_probability": 0.15}, "40 %": {"mlm_probability": 0.4}},
    "judges": {
        "blimp": {"score": "minimal-pairs", "data": "blimp.zip"},
        "sentiment": {"task": "classification", "data": "a.tsv", "epochs": 1},
    },
    "claims": [{"better": "40 %", "than": "15 %", "on": ["blimp"], "paper": "W."}],
    "sizes": {"tiny": {}, "small": {"pretrain": {"steps": 7}, "judges": {"blimp": None}}},
}


def written(path, **changes):
    file = path / "grid.yaml"
    file.write_text(yaml.safe_dump({**GRID, **changes}, sort_keys=False))
    return file


def test_a_grid(tmp_path):
    grid = read_grid(str(written(tmp_path)))
    assert (grid.name, grid.size, grid.sizes) == ("masking", "tiny", ("tiny", "small"))
    variant = grid.variants["40 %"]
    assert (variant.rates, variant.seeds) == (("5.0e-4", "1.0e-3"), 3)
    assert words_of("pretrain", {**variant.options, "lr": variant.rates[0]}) == [
        *("--arch=bert-tiny", "--objective=mlm", "--corpus", "a.txt", "--steps=3"),
        *("--mlm-probability=0.4", "--lr=5.0e-4"),
    ]
    assert grid.evaluations["sentiment"].options == {
        **{"seeds": "2", "task": "classification", "data": "a.tsv", "epochs": "1"}
    }
    assert grid.evaluations["sentiment"].scratch and not grid.evaluations["blimp"].scratch
    assert grid.claims[0].on == ("blimp",)  # YAML reads the key "on" as true


def test_a_rate_has_both_names(tmp_path):
    """That of a size takes the place of that of the file, however the two are called."""
    pretrain = {name: value for name, value in GRID["pretrain"].items() if name != "lr"}
    variants = {"a": {"learning_rate": 0.5}, "b": {"lr": [0.25, 0.5]}}
    shared = {"finetune": {"lr": 1e-4}, "pretrain": {**pretrain, "lr": 1}, "claims": []}
    judges = {"sentiment": {**GRID["judges"]["sentiment"], "learning_rate": "2e-4"}}
    grid = read_grid(str(written(tmp_path, **shared, variants=variants, judges=judges)))
    assert [grid.variants[name].rates for name in "ab"] == [("0.5",), ("0.25", "0.5")]
    assert grid.evaluations["sentiment"].options["learning_rate"] == "2e-4"
    assert "lr" not in grid.evaluations["sentiment"].options


def test_a_size_without_a_judge_is_without_its_claims(tmp_path):
    claims = [
        {"better": "40 %", "than": "15 %", "on": ["blimp", "sentiment", "blimp at 0.5"]},
        {"better": "15 %", "than": "40 %", "on": "blimp"},
    ]
    variants = {"15 %": {"judges": ["blimp", "sentiment"]}, "40 %": {}}
    file = str(written(tmp_path, claims=claims, variants=variants))
    assert [claim.on for claim in read_grid(file).claims] == [
        ("blimp", "sentiment", "blimp at 0.5"),
        ("blimp",),
    ]
    small = read_grid(file, "small")
    assert [(claim.better, claim.on) for claim in small.claims] == [("40 %", ("sentiment",))]
    assert small.variants["15 %"].judges == ("sentiment",)


def test_a_claim_of_the_mean_needs_several_judges_that_fine_tune(tmp_path):
    claims = [{"better": "40 %", "than": "15 %", "on": ["mean", "blimp"]}]
    assert read_grid(str(written(tmp_path, claims=claims))).claims[0].on == ("blimp",)
    film = {"task": "classification", "data": "a.tsv"}
    judges = {"sentiment": film, "again": film, "blimp": {"score": "minimal-pairs", "data": "b"}}
    grid = read_grid(str(written(tmp_path, claims=claims, judges=judges)))
    assert grid.claims[0].on == ("mean", "blimp")
    order = {"task": "sop", "data": "books.txt"}  # no task of GLUE's, and so none of the mean
    judges = {"sop": order, "sentiment": film, "blimp": judges["blimp"]}
    alone = read_grid(str(written(tmp_path, judges=judges, claims=claims)))
    assert alone.claims[0].on == ("blimp",)
    with pytest.raises(ArgumentValueError, match="a judge of the name 'mean'"):
        read_grid(str(written(tmp_path, judges={"mean": film})))


def test_a_size_changes_what_it_names(tmp_path):
    grid = read_grid(str(written(tmp_path, claims=[])), "small")
    assert grid.variants["15 %"].options["steps"] == "7" and list(grid.evaluations) == ["sentiment"]
    assert grid.variants["15 %"].options["arch"] == "bert-tiny"


def test_all_combinations(tmp_path):
    grid = {"vocab_size": [4000, 8000], "mlm_probability": [0.15, 0.4]}
    changes = {"variants": None, "grid": grid, "claims": []}
    file = tmp_path / "grid.yaml"
    content = {k: v for k, v in {**GRID, **changes}.items() if v is not None}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    found = read_grid(str(file)).variants
    assert list(found) == [
        f"vocab_size {v}, mlm_probability {m}" for v in (4000, 8000) for m in (0.15, 0.4)
    ]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"variant": {}}, "variant; expected a valid name. Did you mean variants?"),
        ({"variants": {"a": {"mlm_probabilty": 1}}}, "a: mlm_probabilty; .* mlm_probability?"),
        ({"variants": {"a": {"mlm_probability": 2}}}, "a: mlm_probability: '2'; expected a"),
        ({"variants": {"a": {"arch": "bert-tny"}}}, "a: arch: 'bert-tny'; .* Did you mean bert-"),
        ({"variants": {"a": {"seed": 1}}}, "a: seed; expected no option that the study gives"),
        ({"variants": {"a": {"model_of": "b"}}}, "a: model_of: b; expected a valid name"),
        ({"variants": {}}, "no variants"),
        ({"variants": 3}, "variants: 3; expected names and values"),
        ({"grid": {}}, "both or neither of variants and grid"),
        ({"judges": {"a": {"data": "a.tsv"}}}, "the judge a, with neither; expected either task"),
        (
            {"judges": {"a": {"task": "classify", "data": "x"}}},
            "a: task: 'classify'; .* Did you mean cl",
        ),
        ({"judges": {"a": {"task": "qa", "data": "x", "threshold": 1}}}, "`threshold` got 1.0"),
        ({"judges": {"a": {"score": "minimal-pair", "data": "x"}}}, "Did you mean minimal-pairs?"),
        ({"claims": [{"better": "41 %", "than": "15 %"}]}, "claim 1: better: 41 %; .* mean 40 %?"),
        (
            {"claims": [{"better": "40 %", "than": "15 %", "beyond": "blmp"}]},
            "claim 1: beyond: blmp; .* mean blimp?",
        ),
        ({"claims": [{"better": "40 %", "on": []}]}, "claim 1, without than"),
        ({"claims": [{"better": "40 %", "than": "15 %", "on": ["blmp"]}]}, "Did you mean blimp?"),
        ({"claims": {"a": 1}}, "claims that are no list"),
        ({"sizes": {"tiny": {"pretran": {}}}}, "sizes: tiny: pretran; .* Did you mean pretrain?"),
        ({"pretrain": {**GRID["pretrain"], "seeds": 0}}, "seeds: got '0'; expected a whole number"),
        ({"question": ["a"]}, "question: .*; expected a text"),
        (
            {"variants": {a: {"start_from": {"variant": b}} for a, b in ("ab", "ba")}},
            "variants that need each other: a, b",
        ),
    ],
)
def test_errors_have_the_nearest_word(changes, said, tmp_path):
    file = written(tmp_path, **changes)
    with pytest.raises(ArgumentValueError) as error:
        read_grid(str(file))
    assert str(error.value).startswith(f"study: `study` got {file}, with ")
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), str(error.value)), str(error.value)


def test_a_name_or_size_that_is_not_there(tmp_path, capsys):
    assert main(["study", "maskin", "--dry-run"]) == 2
    assert "masking" in capsys.readouterr().err
    with pytest.raises(ArgumentValueError, match="`size` got 'tny'.* Did you mean tiny?"):
        read_grid(str(written(tmp_path)), "tny")


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_library(path):
    """Each has the three sizes, asks something, and names the papers of its claims."""
    first = read_grid(path.stem)
    assert first.sizes == ("tiny", "small", "full") and first.size == "tiny"
    for size in first.sizes:
        grid = read_grid(path.stem, size)
        assert grid.question.endswith("?") and grid.paper
        assert grid.name.replace(" ", "-") == path.stem
        assert all(claim.paper for claim in grid.claims)
        assert all(v.seeds >= 3 for v in grid.variants.values() if v.seeds), "3 seeds at least"
