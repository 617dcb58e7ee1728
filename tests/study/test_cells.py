"""The cells of a study: which there are, and what their keys depend on."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from fastplm.cli import main
from fastplm.errors import DataError
from fastplm.run.folder import write_hashed
from fastplm.study import cells, costs
from fastplm.study.cells import Planner, Store, loss_of_choice
from fastplm.study.code import meaning
from fastplm.study.engine import rules, words_of
from fastplm.study.grid import HELD_OUT, MEAN, STUDIES, read_grid
from fastplm.study.progress import DONE, Speeds, progress, write_plan


def planner(threads=1, data=None, size=None):
    grid = read_grid("grid.yaml", size)
    return Planner(grid, Store("cells"), data, threads, "cache")


def finish(cell, **figures):
    """Write what a finished cell has."""
    folder = Store("cells").at(cell)
    folder.mkdir(parents=True, exist_ok=True)
    times = {"seconds": 10.0, "cpu_seconds": 9.0, "train_seconds": 8.0}
    content = {"label": cell.label, "diverged": False, "code": "0", "flops": 1e9, "times": times}
    write_hashed(folder / DONE, {**content, **figures})


def keys(**options):
    return sorted(planner(**options).plan().cells)


def changed(place, before, after):
    file = place / "grid.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_the_cells_of_a_grid(place):
    plan = planner().plan()
    labels = [cell.label for cell in plan.cells.values() if not cell.provisional]
    assert labels[:2] == ["15 % at 5.0e-4, seed 0", "15 % at 1.0e-3, seed 0"]
    assert "40 %, seed 0" in labels and "40 %, seed 1: pairs" in labels
    # The judges of 15 % wait for its learning rate.
    assert not plan.complete and not any(label.startswith("15 %, ") for label in labels)
    first = next(cell for cell in plan.cells.values() if cell.label == "40 %, seed 0")
    assert first.words == (
        *("--arch=bert-tiny", "--objective=mlm", "--corpus", str(place / "stories.txt")),
        *("--steps=3", "--batch-size=4", "--block-size=32", "--vocab-size=120"),
        *("--precision=fp32", "--mlm-probability=0.40", "--lr=1.0e-3", "--seed=0"),
        *(f"--cache={'cache'}", "--threads=1", "--report-to=none"),
    )


def test_the_rate_with_the_lowest_loss_is_taken(place):
    plan = planner().plan()
    by_label = {cell.label: cell for cell in plan.cells.values() if not cell.provisional}
    finish(by_label["15 % at 5.0e-4, seed 0"], held_out={"mlm_loss": 4.0})
    assert not planner().plan().complete, "one rate is not known yet"
    finish(by_label["15 % at 1.0e-3, seed 0"], held_out={"mlm_loss": 3.5})
    plan = planner().plan()
    assert plan.complete and plan.variants["15 %"].rate == "1.0e-3"
    assert plan.variants["15 %"].tried == {"5.0e-4": 4.0, "1.0e-3": 3.5}
    # The first seed is the cell that was tried.
    assert plan.variants["15 %"].trainings[0].key == by_label["15 % at 1.0e-3, seed 0"].key
    finish(by_label["15 % at 1.0e-3, seed 0"], held_out={}, diverged=True)
    assert planner().plan().variants["15 %"].rate == "5.0e-4", "a rate that diverges loses"
    finish(by_label["15 % at 5.0e-4, seed 0"], held_out={}, diverged=True)
    with pytest.raises(DataError, match="15 %, which diverged at 5.0e-4, 1.0e-3"):
        planner().plan()


def test_a_rate_at_which_the_discriminator_learns_is_taken(place):
    """One of a lower loss may suit the generator alone; one that diverges is worse still."""
    by_label = {cell.label: cell for cell in planner().plan().cells.values()}
    low, high = (by_label[f"15 % at {rate}, seed 0"] for rate in ("5.0e-4", "1.0e-3"))
    learned = {"mlm_loss": 4.9, "rtd_loss": 0.41, "words_balanced_accuracy": 0.61}
    not_yet = {"mlm_loss": 4.7, "rtd_loss": 0.45, "words_balanced_accuracy": 0.5}
    for held_out, other, rate in (
        ((learned, not_yet), {}, "5.0e-4"),
        ((not_yet, not_yet | {"mlm_loss": 4.6}), {}, "1.0e-3"),
        ((not_yet, {}), {"diverged": True}, "5.0e-4"),
    ):
        finish(low, held_out=held_out[0])
        finish(high, held_out=held_out[1], **other)
        assert planner().plan().variants["15 %"].rate == rate


def test_what_a_rate_is_chosen_by():
    """The figures are of ELECTRAs at 1e-3 and 2e-3: the second generator knows no context."""
    plateaus = {"unigram_loss": 6.27, "bigram_loss": 4.54}
    better = {"mlm_loss": 5.19, "rtd_loss": 0.138, "words_loss": 3.9} | plateaus
    worse = {"mlm_loss": 6.33, "rtd_loss": 0.046, "words_loss": 4.1} | plateaus
    assert better["mlm_loss"] + 50 * better["rtd_loss"] > worse["mlm_loss"] + 50 * worse["rtd_loss"]
    assert loss_of_choice(better) == 5.19 < loss_of_choice(worse) == 6.33
    unigram = {"rtd_loss": 0.4, "words_loss": 0.3} | plateaus  # a generator that is not trained
    assert loss_of_choice(unigram) == 0.4
    all_tokens = {"mlm_loss": 5.0, "discriminator_mlm_loss": 1.25, "discriminator_chosen_loss": 4.0}
    assert loss_of_choice(all_tokens) == 6.25
    assert loss_of_choice({"mlm_loss": 4.0, "next_sentence_loss": 0.5}) == 4.5
    assert loss_of_choice(plateaus) is None


def test_keys_stay_where_nothing_that_matters_changes(place):
    before = keys()
    changed(place, "question: Is", "question: Truly, is")
    changed(place, "lr: 1.0e-3}", "lr: 0.001, block_size: 32}")  # another spelling of the same
    changed(place, "40 %", "two fifths")
    os.utime(place / "stories.txt", (1, 1))
    assert keys() == before
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    for name in ("stories.txt", "train.tsv", "pairs.jsonl"):
        (elsewhere / name).write_bytes((place / name).read_bytes())
    assert keys(data=elsewhere) == keys(), "files count by their contents"


@pytest.mark.parametrize(
    "name, before, after, changes",
    [
        ("grid.yaml", "steps: 3\n  batch", "steps: 4\n  batch", "pretrain finetune score"),
        ("grid.yaml", "mlm_probability: 0.40", "mlm_probability: 0.30", "pretrain finetune score"),
        ("grid.yaml", "{seeds: 2, steps", "{seeds: 3, steps", "finetune"),
        ("stories.txt", "teacher", "preacher", "pretrain finetune score"),
        ("train.tsv", "yes", "no", "finetune"),
        ("pairs.jsonl", "house", "home", "score"),
    ],
)
def test_keys_change_with_what_matters(name, before, after, changes, place):
    """In the variant 40 %: a training that changes makes new cells of all that reads its model."""

    def found():
        planned = planner().plan().variants["40 %"]
        judged = [cell for each in planned.judged.values() for cell in each]
        return {(cell.command, cell.label): cell.key for cell in (*planned.trainings, *judged)}

    old = found()
    file = place / name
    file.write_text(file.read_text().replace(before, after))
    new = found()
    assert old.keys() == new.keys()
    assert {key[0] for key in old if old[key] != new[key]} == set(changes.split())
    assert all(old[key] != new[key] for key in old if key[0] in changes)


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
        costs._examples.cache_clear()
        return planner().plan().variants["40 %"].judged["sentiment", 1.0][0]

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


def test_names_of_the_hub_stay_names(place, monkeypatch):
    """A corpus and a data set by name: their keys are those of their rows."""
    changed(place, "data: train.tsv", "data: 'hf:acme/tiny'")
    changed(place, "corpus: stories.txt", "corpus: ['hf:acme/text']")
    rows = {"hf:acme/tiny": "1", "hf:acme/text": "2"}
    monkeypatch.setattr(cells, "fingerprint", lambda path: rows[str(path)])
    lines = [json.dumps({"text": "a b c", "label": "yes"}) + "\n"] * 10
    monkeypatch.setattr(
        "fastplm.data.examples.json_lines", lambda path: lines if rows[str(path)] else []
    )
    costs._examples.cache_clear()
    before = planner().plan().variants["40 %"]
    assert "hf:acme/text" in before.trainings[0].words
    rows["hf:acme/tiny"] = "3"
    after = planner().plan().variants["40 %"]
    assert [c.key for c in before.trainings] == [c.key for c in after.trainings]
    judged = [plan.judged["sentiment", 1.0][0].key for plan in (before, after)]
    assert judged[0] != judged[1]


def test_keys_change_with_threads_and_recipes(place, monkeypatch):
    before = keys()
    assert not {*before} & {*keys(threads=2)}
    monkeypatch.setitem(cells.RECIPES, "score", 2)
    after = {cell.key: cell for cell in planner().plan().cells.values()}
    new = [cell for key, cell in after.items() if key not in before]
    assert new and {cell.command for cell in new} == {"score"}


def test_variants_of_one_shape_share_the_model_without_pretraining(place):
    """A masking rate does not change new weights; a vocabulary does."""
    changed(place, "lr: [5.0e-4, 1.0e-3]", "lr: 5.0e-4")

    def scratch():
        return {v.scratch["sentiment"].key for v in planner().plan().variants.values()}

    assert len(scratch()) == 1
    changed(place, "0.40, lr", "0.40, vocab_size: 130, lr")
    assert len(scratch()) == 2


def test_a_model_of_another_variant(place):
    second = '  second: {start_from: {variant: "40 %"}, vocab_size: null}'
    changed(place, "judges:", f"{second}\njudges:")
    plan = planner().plan()
    ours, theirs = plan.variants["second"].trainings, plan.variants["40 %"].trainings
    assert [cell.needs for cell in ours] == [(each,) for each in theirs]
    folder = Store("cells").at(theirs[1]) / "run/model"
    assert f"--start-from={folder}" in ours[1].words


def test_variants_that_share_their_models(place):
    """Nothing is trained for a variant that takes another one's models, and few may judge it."""
    frozen = '  frozen: {model_of: "40 %", finetune: {freeze: true}, judges: [sentiment]}'
    changed(place, "judges:", f"{frozen}\njudges:")
    planned = planner().plan().variants
    theirs, ours = planned["40 %"], planned["frozen"]
    assert ours.trainings == theirs.trainings and list(ours.judged) == [("sentiment", 1.0)]
    cells = ours.judged["sentiment", 1.0]
    assert [cell.label for cell in cells] == [
        f"frozen of 40 %, seed {seed}: sentiment" for seed in (0, 1)
    ]
    assert not ours.scratch and theirs.scratch, "new weights cannot be frozen"
    assert all("--freeze" in cell.words and cell.config is not None for cell in cells)


def test_new_weights_have_other_seeds_in_each_row(place):
    """Nothing of them is pre-trained: with the same seeds all rows would be one training."""
    new = '  new: {model_of: "40 %", finetune: {from_scratch: true}, judges: [sentiment]}'
    changed(place, "judges:", f"{new}\njudges:")
    planned = planner().plan().variants
    cells = planned["new"].judged["sentiment", 1.0]
    assert [[w for w in cell.words if "seed=" in w] for cell in cells] == [
        ["--seed=0"],
        ["--seed=2"],
    ]
    theirs = planned["40 %"].judged["sentiment", 1.0]
    assert not any("seed=" in word for cell in theirs for word in cell.words)


def test_states_of_a_training_are_judged(place):
    """They are known when the training is finished: those after equal shares of its steps."""
    changed(place, "question:", "curve: 2\nquestion:")
    changed(place, "arch: bert-tiny\n  objective: mlm", "arch: electra-tiny")
    states = [cell for cell in planner().plan().cells.values() if "after 50%" in cell.label]
    assert states and all(cell.provisional for cell in states)
    trainings = planner().plan().variants["40 %"].trainings
    for number, cell in enumerate(trainings, 1):
        assert "--states=2" in cell.words
        finish(cell, held_out={})
        for step in (1, 2, 3, 4):
            (Store("cells").at(cell) / f"run/checkpoint-{step}").mkdir(parents=True)
        # Where other seeds are not finished, those of this one can be judged.
        states = planner().plan().variants["40 %"].judged["pairs", 0.5]
        assert [state.provisional for state in states] == [False] * number + [True] * (2 - number)
        assert f"--model={Store('cells').at(cell) / 'run/checkpoint-2'}" in states[number - 1].words
    judged = planner().plan().variants["40 %"].judged
    for cell, training in zip(judged["pairs", 0.5], trainings, strict=True):
        state = Store("cells").at(training) / "run/checkpoint-2"
        assert {f"--model={state}", "--part=discriminator"} <= {*cell.words}
    for cell, training in zip(judged["pairs", 1.0], trainings, strict=True):
        assert f"--model={Store('cells').at(training) / 'run/discriminator'}" in cell.words
    (Store("cells").at(trainings[0]) / "run/checkpoint-40").mkdir()
    with pytest.raises(DataError, match="no state after 50% of its steps"):
        planner().plan()
    finish(trainings[0], held_out={}, diverged=True)
    (judge, _) = planner().plan().variants["40 %"].judged["pairs", 0.5]
    assert not judge.provisional and judge.needs == trainings[:1], "it ends without a model"
    shutil.rmtree(Store("cells").at(trainings[1]) / "run")
    with pytest.raises(DataError, match="no state after 50% of its steps"):
        planner().plan()
    changed(place, "arch: electra-tiny", "arch: electra-tiny\n  two_stage: true")
    with pytest.raises(DataError, match="which has two stages"):
        planner().plan()


def test_the_rules_of_the_engine(place):
    plan = planner().plan()
    ready = [cell for cell in plan.cells.values() if not cell.provisional]
    text = rules(ready, Path("plan.json"))
    compile(text.split("rule all")[0], "Snakefile", "exec")
    assert text.count("\nrule ") == len(ready)
    judge = next(cell for cell in ready if cell.command == "score")
    rule = text.split(f"rule score_{judge.key}:")[1].split("rule ")[0]
    assert f'ancient("{judge.needs[0].key}/done.json")' in rule
    assert f'output: "{judge.key}/done.json"' in rule


@pytest.mark.parametrize("options, cores", [([], True), (["--executor", "slurm"], False)])
def test_the_words_of_the_engine(options, cores):
    """On a cluster the cores of this machine are no limit."""
    words = words_of(Path("a/Snakefile"), Path("cells"), 2, options)
    assert ("--cores" in words) == cores and words[len(words) - len(options) :] == options
    assert {"--nolock", "--ignore-incomplete", "--keep-going"} <= {*words}


def test_time_to_go(place):
    ready = [cell for cell in planner().plan().cells.values() if not cell.provisional]
    write_plan(Path("plan.json"), ready, Path("cells"), jobs=2)
    assert progress(Path("plan.json")) == (0, len(ready), None)
    finish(ready[0])
    done, of_all, seconds = progress(Path("plan.json"))
    rest = sum(cell.cost for cell in ready[1:])
    assert (done, of_all) == (1, len(ready))
    assert seconds == pytest.approx(10.0 * rest / ready[0].cost / 2)
    speeds = Speeds([("pretrain", 100.0, 5.0), ("score", 10.0, 5.0)])
    assert speeds.seconds("pretrain", 40.0) == 2.0 and speeds.seconds("finetune", 11.0) == 1.0


def words(folder, name, *lines):
    """A file of the data that the studies name, plain or compressed as its name says."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if name.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def all_data(tmp_path_factory):
    """The files of all studies, with a few lines each."""
    folder = tmp_path_factory.mktemp("data")
    for part in ("train", "valid"):
        words(folder, f"text/books-10m.{part}.txt.gz", *["One sentence. Another one."] * 40)
        pair = {"premise": "He sleeps.", "hypothesis": "He does.", "label": 0}
        words(folder, f"nli/mnli.{part}.jsonl.gz", *map(json.dumps, [pair, pair | {"label": 1}]))
    for part in ("train", "dev"):
        words(folder, f"sentiment/movie.{part}.tsv", "score\ttext", "1.5\tGood.", "-1.5\tBad.")
    for part in ("train", "test"):
        head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        rows = [f"{label}\t1\t2\tHe sleeps.\tHe does." for label in (0, 1)]
        words(folder, f"pairs/mrpc.{part}.txt", head, *rows)
        for language in ("en", "de"):
            words(folder, f"translation/multi30k.{part}.{language}.gz", *["He sleeps."] * 9)
    for part in ("dev", "test"):
        words(folder, f"tagging/ewt-pos.{part}.tsv", "He\tPRON", "sleeps\tVERB", "", "No\tINTJ")
    pairs = {"sentence_good": "He sleeps.", "sentence_bad": "He sleep.", "UID": "agreement"}
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("agreement.jsonl", json.dumps(pairs) + "\n")
    (folder / "blimp").mkdir()
    (folder / "x.zip").rename(folder / "blimp/blimp.zip")
    words(folder, "text/wikitext-2.valid.txt", *["One sentence. Another one."] * 40)
    words(folder, "blimp/models_summary.jsonl", json.dumps({"UID": "agreement", "gpt2": 0.9}))
    return folder


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
@pytest.mark.parametrize("name", sorted(path.stem for path in STUDIES.glob("*.yaml")))
def test_every_study_that_comes_along_can_be_planned(all_data, tmp_path, name, size):
    """All its settings are valid together, in each size; and its claims are of what it judges."""
    grid = read_grid(name, size)
    plan = Planner(grid, Store(tmp_path), all_data, 1, tmp_path / "cache").plan()
    assert len(plan.cells) > 4 and all(cell.cost > 0 for cell in plan.cells.values())
    judged = {judge for each in plan.variants.values() for judge, _ in each.judged}
    asked = {on for claim in grid.claims for on in claim.on} - {MEAN}
    assert asked <= judged | {on for on in asked if on.startswith(HELD_OUT)}


def test_studies_share_their_trainings(all_data, tmp_path):
    """A model is trained once for several studies, as often as each of them needs it."""
    keys = {}
    for name in ("objectives", "electra", "causal-or-masked"):
        store = Store(tmp_path)
        plan = Planner(read_grid(name, "tiny"), store, all_data, 1, tmp_path / "cache").plan()
        for variant, each in plan.variants.items():
            keys[name, variant] = [cell.key for cell in each.trainings]
    ours, theirs = keys["objectives", "ELECTRA"], keys["electra", "generator 1/4"]
    assert theirs and theirs == ours[: len(theirs)] != keys["objectives", "MLM"][: len(theirs)]
    assert keys["causal-or-masked", "ELECTRA"] == ours
    assert keys["causal-or-masked", "BERT"] == keys["objectives", "MLM"]


def test_a_change_of_one_objective_makes_new_cells_of_it_alone(all_data, tmp_path, monkeypatch):
    def trained(study="causal-or-masked"):
        grid = read_grid(study, "tiny")
        plan = Planner(grid, Store(tmp_path), all_data, 1, tmp_path / "cache").plan()
        return {name: each.trainings[0].key for name, each in plan.variants.items()}

    def raised(recipes, name):
        monkeypatch.setitem(recipes, name, recipes[name] + 1)

    before = trained()
    raised(cells.RECIPES_OF_OBJECTIVES, "denoise")
    after = trained()
    assert [name for name in before if before[name] != after[name]] == ["BART"]
    raised(cells.RECIPES_OF_OBJECTIVES, "rtd")
    last = trained()
    assert [name for name in after if after[name] != last[name]] == ["ELECTRA"]
    before = trained("objectives")
    raised(cells.RECIPES_OF_DISCRIMINATORS, "all_tokens_mlm")
    after = trained("objectives")
    assert [name for name in before if before[name] != after[name]] == ["All-Tokens MLM"]


def test_models_that_read_from_left_to_right_have_new_weights_of_their_own(all_data, tmp_path):
    """A model of new weights is one of the same attention, too."""
    grid = read_grid("causal-or-masked", "tiny")
    variants = Planner(grid, Store(tmp_path), all_data, 1, tmp_path / "cache").plan().variants
    ours, theirs = (variants[name].scratch["tags"] for name in ("BERT", "BERT, left to right"))
    assert ours.key != theirs.key


def test_cells_of_a_machine_without_bf16_are_its_own(place, monkeypatch):
    """The default precision is the machine's; one that is given is anybody's."""
    monkeypatch.setattr(cells, "hardware_has_bf16", lambda: True)
    given = keys()
    changed(place, "  precision: fp32\n", "")
    usual = keys()
    scratch = [each.scratch for each in planner().plan().variants.values()]
    monkeypatch.setattr(cells, "hardware_has_bf16", lambda: False)
    shared = set(keys()) & set(usual)  # a model without pre-training has no such precision
    assert shared == {cell.key for each in scratch for cell in each.values()}
    changed(place, "pretrain:\n", "pretrain:\n  precision: fp32\n")
    assert keys() == given


def test_a_dry_run_writes_nothing(place, capsys):
    before = sorted(place.iterdir())
    assert main(["study", "grid.yaml", "--dry-run", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert sorted(place.iterdir()) == before
    assert "pretrain" in shown and "40 %, seed 1: pairs" in shown
    assert "at least: at the speed of a matrix product" in shown and "with 2 jobs" in shown


def test_a_file_that_is_not_there(place, capsys):
    (place / "pairs.jsonl").unlink()
    assert main(["study", "grid.yaml", "--dry-run"]) == 2
    assert f"`data` got {place / 'pairs.jsonl'}; expected a file" in capsys.readouterr().err
    assert main(["study", "masking", "--dry-run"]) == 2
    assert "Give --data DIR" in capsys.readouterr().err


def test_without_the_engine(place, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["study", "grid.yaml"]) == 2
    assert "pip install 'snakemake>=9'" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_docstrings_and_comments_are_not_the_code():
    code = 'def f(x):\n    """One."""\n    return x + 1\n'
    assert meaning(code) == meaning('# A comment.\ndef f(x):\n    """Two."""\n    return x + 1')
    assert meaning(code) != meaning(code.replace("+ 1", "+ 2"))


def test_what_a_cell_says_it_is(place):
    from fastplm.study.engine import describe

    cell = next(iter(planner().plan().cells.values()))
    describe(cell, Store("cells"))
    content = json.loads((Store("cells").at(cell) / "cell.json").read_text())
    assert content["facts"]["settings"]["mlm_probability"] == 0.15
    assert content["words"] == list(cell.words) and len(content["code"]) == 16
