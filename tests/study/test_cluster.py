"""The files of studies/cluster: commands take what they start, and SLURM's plugin runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from fastplm.cli import _parser
from fastplm.study.engine import words_of

CLUSTER = Path(__file__).parents[2] / "studies" / "cluster"
OPTIONS = "--arch bert-large --corpus text --steps 9 --out {out} --cache cache".split()
#: What records how it was called, in a file of its own.
RECORD = """\
#!{python}
import json, sys
json.dump(sys.argv[1:], open({file!r}, "w"))
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """``tools(name, text)``: a program in the first folder of PATH, in the place of a cluster's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(name: str, text: str) -> None:
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return write


@pytest.fixture
def started(tools, tmp_path):
    """``started()``: what torchrun, which only records it, was told: (its options, fastplm's)."""
    file = tmp_path / "torchrun.json"
    tools("torchrun", RECORD.format(python=sys.executable, file=str(file)))

    def started():
        words = json.loads(file.read_text())
        at = words.index("-m")
        launch = get_args_parser().parse_args(words)
        assert launch.training_script == "fastplm" and launch.module
        return launch, vars(_parser().parse_args(words[at + 2 :]))

    return started


@pytest.mark.parametrize("resumed", (False, True))
def test_a_job_of_slurm_starts_torchrun(tools, started, tmp_path, monkeypatch, resumed):
    tools("scontrol", '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-3]" ] && seq -f n%g 1 3\n')
    tools("srun", '#!/bin/sh\n[ "$1" = --kill-on-bad-exit ] && shift && exec "$@"\n')
    for name, value in (("NODELIST", "n[1-3]"), ("NUM_NODES", "3"), ("ID", "17")):
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    out = tmp_path / "out"
    (out / "checkpoint-5" if resumed else out).mkdir(parents=True)
    script = CLUSTER / "slurm" / "pretrain.sbatch"
    words = [word.format(out=out) for word in OPTIONS]
    subprocess.run(["bash", script, *words], check=True)
    launch, own = started()
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_id) == ("3", "8", "17")
    assert launch.rdzv_endpoint == "n1:29500"
    assert own["arch"] == "bert-large" and own["out"] == str(out)
    assert own.get("resume", False) is resumed


def test_options_of_sbatch_are_lines_that_it_reads():
    lines = (CLUSTER / "slurm" / "pretrain.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    code = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    # Behind the first command they would be comments.
    assert options and all(lines.index(line) < code for line in options)
    assert all(line.split()[1].startswith("--") for line in options)


def test_a_job_of_kubernetes_starts_torchrun(started, tmp_path):
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes" / "pretrain.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    subprocess.run([*container["command"], *container["args"]], check=True)
    launch, own = started()
    pods = (spec["completions"], spec["parallelism"], int(launch.nnodes))
    assert len({*pods}) == 1 and spec["completionMode"] == "Indexed"
    assert int(launch.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The name of pod 0 in a headless service of the name of its subdomain.
    name, domain = job["metadata"]["name"], pod["subdomain"]
    assert launch.rdzv_endpoint == f"{name}-0.{domain}:29500"
    assert service["metadata"]["name"] == domain and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert all(str(own[path]).startswith(mounts["shared"]) for path in ("out", "cache"))


def test_a_study_in_a_pod():
    job = yaml.safe_load((CLUSTER / "kubernetes" / "study.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *words = [*container["command"], *container["args"]]
    own = vars(_parser().parse_args(words))
    assert program == "fastplm"
    assert own["jobs"] * own["threads"] == container["resources"]["requests"]["cpu"]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["name"] == mount["name"]
    paths = [own[name] for name in ("study", "cells", "cache", "folder")]
    assert all(str(path).startswith(mount["mountPath"]) for path in paths)


needs = pytest.mark.skipif(
    importlib.util.find_spec("snakemake") is None
    or importlib.util.find_spec("snakemake_executor_plugin_slurm") is None,
    reason="Snakemake's plugin for SLURM is not installed",
)
STUDY = [sys.executable, "-m", "fastplm", "study", "grid.yaml", "--cache", "cache"]


@needs
@pytest.mark.slow
def test_snakemake_reads_the_profile(tmp_path):
    """A dry run with the words of a study, which plans a job and runs none."""
    snakefile, folder = tmp_path / "Snakefile", tmp_path / "slurm"
    snakefile.write_text('rule all:\n    output: "done"\n    shell: "touch done"\n')
    shutil.copytree(CLUSTER / "slurm", folder)
    options = ["--profile", str(folder), "--dry-run"]
    words = [sys.executable, "-m", "snakemake", *words_of(snakefile, tmp_path, 1, options)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (folder / "config.yaml").open("a") as file:
        file.write("an-option-that-is-none: 1\n")
    assert subprocess.run(words, capture_output=True).returncode != 0


#: sbatch that runs a job at once, and keeps what it was told.
SBATCH = """\
#!{python}
import json, os, subprocess, sys
from pathlib import Path
words, jobs = sys.argv[1:], Path({jobs!r})
number = str(len(list(jobs.glob("*.json"))) + 1)
(jobs / (number + ".json")).write_text(json.dumps(words))
wrapped = next(word for word in words if word.startswith("--wrap="))[len("--wrap="):]
own = dict(os.environ, SLURM_JOB_ID=number)
log = open(jobs / (number + ".log"), "w")
done = subprocess.run(wrapped, shell=True, env=own, stdout=log, stderr=log)
(jobs / (number + ".state")).write_text("COMPLETED" if done.returncode == 0 else "FAILED")
print(number)
"""
SACCT = """\
#!{python}
from pathlib import Path
for path in Path({jobs!r}).glob("*.state"):
    print(path.stem + "|" + path.read_text())
"""


@needs
@pytest.mark.slow
def test_a_study_runs_its_cells_by_slurm(place, tools):
    """With programs in the place of SLURM's, which run a job on this machine."""
    jobs = place / "jobs"
    jobs.mkdir()
    given = {"python": sys.executable, "jobs": str(jobs)}
    tools("sbatch", SBATCH.format(**given))
    tools("sacct", SACCT.format(**given))
    tools("sacctmgr", "#!/bin/sh\necho research\n")
    tools("sinfo", "#!/bin/sh\nprintf 'PARTITION\\nmain*\\n'\n")
    tools("srun", '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n')
    text = (place / "grid.yaml").read_text()
    (place / "grid.yaml").write_text(
        text.split("judges:")[0].replace("seeds: 2\nfine", "seeds: 1\nfine")
    )
    profile = place / "slurm"
    shutil.copytree(CLUSTER / "slurm", profile)
    config = profile / "config.yaml"
    often = "slurm-init-seconds-before-status-checks: 1\n"  # not 40, as here a job is done at once
    config.write_text(config.read_text() + often)
    engine = f"--profile {shlex.quote(str(profile))}"
    done = subprocess.run([*STUDY, "--engine", engine], capture_output=True, text=True)
    logs = "".join(path.read_text() for path in jobs.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    submitted = [json.loads(path.read_text()) for path in jobs.glob("*.json")]
    cells = [*(place / "runs" / "cells").glob("*/done.json")]
    assert len(submitted) == len(cells) > 1
    for words in submitted:
        said = " ".join(words)
        assert "-A research" in said and "-p main" in said and "-t 720" in said
        assert "--mem 16000" in said and "fastplm.study.cell" not in words[0]
