from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import fastplm
from fastplm.cli import _parser, main
from fastplm.pretrain.demo import LEAST_STEPS

COMMANDS = "info measure demo pretrain finetune distill classic embed prompt score study".split()


@pytest.mark.parametrize("words", ["--version", "--help", *(f"{name} --help" for name in COMMANDS)])
def test_help_imports_nothing_heavy(words):
    """Few modules are imported, and no heavy one, which takes half a second at most."""
    script = (
        "import json, sys, time\n"
        "before = set(sys.modules)\n"
        "from fastplm.cli import main\n"
        f"try: main({words.split()})\n"
        "finally: print('\\n', json.dumps([time.process_time(), *set(sys.modules) - before]))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    text, _, last = shown.stdout.rstrip().rpartition("\n")
    seconds, *imported = json.loads(last)
    heavy = ("torch", "transformers", "numpy", "tokenizers", "matplotlib", "triton")
    assert not {name.split(".")[0] for name in imported} & set(heavy)
    assert len(imported) < 100 and seconds < 0.5
    if words == "pretrain --help":
        assert "of attention weights, in the fused kernel too (default: 0.1; 0 for" in " ".join(
            text.split()
        )
    if words == "--version":
        assert text.strip() == f"fastplm {fastplm.__version__}"


RUN = "pretrain --arch bert-tiny --corpus a.txt --steps 3 --out out"
TUNE = "finetune --task qa --model m --data d --out out"


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "arguments are required: COMMAND"),
        ("pretrian", "COMMAND: got 'pretrian'; expected info | .*. Did you mean pretrain?"),
        ("nothing", "COMMAND: got 'nothing'; expected info | .* (see"),
        ("pretrain --arch bert-smal", "--arch: got 'bert-smal'; .*. Did you mean bert-small?"),
        ("pretrain --arch BERT", "--arch: got 'BERT'; expected bert-tiny | "),
        (f"{RUN} --batchsize 3", "arguments: --batchsize 3. Did you mean --batch-size?"),
        (f"{RUN} --sedd=3", "arguments: --sedd=3. Did you mean --seed?"),
        (f"{RUN} --tokenizer t --vocab-size 99", "not allowed with argument --tokenizer"),
        (f"{RUN} --objective ml", "--objective: got 'ml'; .*. Did you mean mlm?"),
        (f"{RUN} --steps 10^19", "--steps: got '10^19'; expected a whole number from 1 to 1"),
        (f"{RUN} --steps {10**19}", f"--steps: got '{10**19}'; expected a whole number from 1"),
        (f"{RUN} --steps {'9' * 5000}", "--steps: got '9999"),
        (f"{RUN} --steps 0", "--steps: got '0'; expected a whole number from 1"),
        (f"{RUN} --steps -3", "--steps: got '-3'; expected a whole number from 1"),
        (f"{RUN} --steps 1.5", "--steps: got '1.5'; expected a whole number"),
        (f"{RUN} --steps", "--steps: expected one argument"),
        (f"{RUN} --vocab-size {10**12}", f"--vocab-size: got '{10**12}'; .* from 6 to 4194304"),
        (f"{RUN} --vocab-size 5", "--vocab-size: got '5'; expected a whole number from 6"),
        (f"{RUN} --block-size 7", "--block-size: got '7'; expected a whole number from 8"),
        (f"{RUN} --batch-size {10**18}", f"--batch-size: got '{10**18}'; expected a whole"),
        (f"{RUN} --threads 0", "--threads: got '0'; expected a whole number from 1"),
        (f"{RUN} --batch-size 1e3", "--batch-size: got '1e3'; expected a whole number"),
        (f"{RUN} --warmup -1", "--warmup: got '-1'; expected a whole number from 0"),
        (f"{RUN} --seed {2**32}", f"--seed: got '{2**32}'; .* from 0 to {2**32 - 1}"),
        (f"{RUN} --seed 1.5", "--seed: got '1.5'; expected a whole number"),
        (f"{RUN} --workers two", "--workers: got 'two'; expected a whole number"),
        (f"{RUN} --lr nan", "--lr/--learning-rate: got 'nan'; expected a number above 0"),
        (f"{RUN} --lr inf", "--lr/--learning-rate: got 'inf'; expected a number"),
        (f"{RUN} --lr 1,5", "--lr/--learning-rate: got '1,5'; expected a number"),
        (
            f"{RUN} --dropout -0.1",
            "--dropout: got '-0.1'; expected a number, 0 or more and below 1",
        ),
        (f"{TUNE} --task tag", "--task: got 'tag'; .*. Did you mean tagging?"),
        (f"{TUNE} --epochs -1", "--epochs: got '-1'; expected a number above 0, 1e9 at most"),
        (f"{TUNE} --steps 0.5", "--steps: got '0.5'; expected a whole number"),
        (f"{TUNE} --max-length 15", "--max-length: got '15'; expected a whole number from 16"),
        (f"{TUNE} --threshold high", "--threshold: got 'high'; expected a number"),
        (f"{TUNE} --threshold nan", "--threshold: got 'nan'; expected a number"),
        (f"{TUNE} --seeds 0", "--seeds: got '0'; expected a whole number from 1"),
        ("classic --system elm", "--system: got 'elm'; .*. Did you mean elmo?"),
        (
            "classic --system elmo --corpus a --out b --steps 0",
            "--steps: got '0'; expected a whole",
        ),
        (
            "classic --system elmo --corpus a --out b --lr 0",
            "--learning-rate/--lr: got '0'; expected",
        ),
        ("embed --model m --data d --out o --pooling meen", "--pooling: got 'meen'; .* mean mean?"),
        ("prompt --model m --data d --prompt p --shots -1", "--shots: got '-1'; expected a whole"),
        ("score --model m --data d --threads -1", "--threads: got '-1'; expected a whole number"),
        ("distill --recipe distil", "--recipe: got 'distil'; .*. Did you mean distilbert?"),
        ("demo --minutes -1", "--minutes: got '-1'; expected a number, 0 or more"),
        ("demo --minutes soon", "--minutes: got 'soon'; expected a number"),
    ],
)
def test_wrong_command_lines_give_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(words.split())
    shown = capsys.readouterr()
    command = " ".join(["fastplm", *words.split()[:1]])
    assert exit.value.code == 2 and not shown.out and not list(tmp_path.iterdir())
    assert shown.err.count("\n") == 1 and shown.err.startswith(("fastplm: error", command))
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), shown.err), shown.err
    assert shown.err.endswith(" --help)\n")


def test_numbers_at_their_ends():
    given = vars(_parser().parse_args(f"{RUN} --lr 1e-4 --steps 1 --seed {2**32 - 1}".split()))
    assert (given["lr"], given["steps"], given["seed"]) == (1e-4, 1, 2**32 - 1)
    given = vars(_parser().parse_args(f"{TUNE} --threshold -2.5 --epochs 0.5".split()))
    assert (given["threshold"], given["epochs"]) == (-2.5, 0.5)


@pytest.mark.slow
def test_info(capsys):
    assert main(["info"]) == 0
    short = capsys.readouterr().out
    assert main(["info", "--all"]) == 0
    table = capsys.readouterr().out
    assert len(short.splitlines()) < 20 < len(table.splitlines())
    assert "cpu     attention" in table and "fastplm info --all" in short


def test_demo_in_no_time(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "`minutes` got 0.0; expected more than 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    """The shortest time has the fewest steps, which still show what the demo should show."""
    assert main(["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert f" {LEAST_STEPS} steps in about " in shown
    assert "FAIL" not in shown and shown.count("\nok ") == 5
    assert "Hugging Face, eager" in shown and "loss.png" in shown
