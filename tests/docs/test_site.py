"""The documentation builds without a warning, takes nothing from the network, and is complete."""

from __future__ import annotations

import csv
import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastplm
from fastplm import data, models, nn, ops

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    said = build.stdout + build.stderr
    assert build.returncode == 0, said
    assert "WARNING" not in said, said
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, str]:
    return {
        str(path.relative_to(site)): path.read_text(encoding="utf-8")
        for path in site.rglob("*.html")
    }


@needs_mkdocs
def test_pages_take_nothing_from_the_network(pages, site):
    resource = re.compile(r"<(?:script|link|img|iframe|source)[^>]+(?:src|href)=\"?(?:https?:)?//")
    for name, page in pages.items():
        assert not resource.search(page), f"{name}: {resource.search(page)}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet


@needs_mkdocs
def test_every_public_name_is_explained(pages):
    for package, page in (
        (fastplm, "api/fastplm.html"),
        (ops, "api/ops.html"),
        (nn, "api/nn.html"),
        (data, "api/data.html"),
        (models, "api/models.html"),
    ):
        anchors = {name.rsplit(".", 1)[-1] for name in re.findall(r"id=\"([\w.]+)\"", pages[page])}
        names = set(package.__all__) - {"__version__", "ops"}
        assert names <= anchors, f"{page} lacks {sorted(names - anchors)}"


@needs_mkdocs
def test_docstrings_become_text(pages):
    """Formulas, arguments with their types, and fastplm's own sections look as intended."""
    page = text_of(pages["api/ops.html"])
    assert "O = dropout(softmax(scale * Q K^T + bias + mask)) V" in page
    assert "Vaswani et al. 2017, eq. 1" in page
    # Two names in one item of the docstring.
    for name in ("key", "value"):
        assert re.search(rf"\b{name} \( Tensor \) – \[B, H, Tk, D\], dtype and device", page)
    for raw in ("Args:", "Numerics:", "Source:", "the others:"):
        assert raw not in page
    assert "ends at the last <eos>" in text_of(pages["api/models.html"])


@needs_mkdocs
def test_first_page_is_the_readme(pages):
    page = text_of(pages["index.html"])
    assert "Pre-training, fine-tuning, distillation and inference of BERT" in page
    assert "from fastplm.models import BertForMaskedLM" in page
    assert "images/padding-cpu.png" in pages["index.html"]


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


# --- what needs no build --------------------------------------------------------------------------


def test_pictures_are_there():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page}: {target}"


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (ROOT / target).exists(), target


# --- the speeds of BERT's step --------------------------------------------------------------------

SETTINGS = {"fp32": "0 fp32", "fp32, dropout 0.1": "0.1 fp32"}
PADDINGS = (0, 30, 50)


def speed_tables() -> list[list[str]]:
    """For each commit and machine with all rows: the lines of the tables in README.md and
    docs/models.md."""
    runs: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    with (ROOT / "benchmarks/results/cpu/bert.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "ok":
                times = [float(row[f"{p}_us"]) for p in ("p20", "p50", "p80")]
                run = runs.setdefault((row["commit"], row["machine"]), {})
                run[row["case"], row["variant"]] = times
    tables = []
    for run in runs.values():
        lines: dict[str, list[str]] = {"short": [], "long": []}
        for name, setting in SETTINGS.items():
            short, long = [f"| {name}"], [f"| {name}"]
            for padding in PADDINGS:
                case = f"base 8x128 padding {padding}% dropout {setting}"
                theirs, ours = (run.get((case, v)) for v in ("transformers sdpa", "fastplm"))
                if theirs and ours:
                    ratio = f"{theirs[1] / ours[1]:.2f}×"
                    spread = f"({theirs[0] / ours[2]:.2f}–{theirs[2] / ours[0]:.2f})"
                    short.append(ratio)
                    long.append(f"{ratio} {spread}")
            lines["short"].append(" | ".join(short) + " |")
            lines["long"].append(" | ".join(long) + " |")
        tables.append(lines["short"] + lines["long"])
    return tables


def test_speeds_are_of_one_commit():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/models.md")]
    shown = [line for page in pages for line in page.splitlines() if line.startswith(tuple(ROWS))]
    assert shown in speed_tables(), "the last one: python tests/docs/test_site.py"


ROWS = [f"| {name} |" for name in SETTINGS]


def family_lines() -> list[str]:
    """Of each family and level: how many times as fast its training and its inference are."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    with (ROOT / "benchmarks/results/cpu/families.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            times = found.setdefault(f"| {row['family']}, {row['level']}", {})
            times[row["work"], row["padding"]] = f"{row['ratio']}×"
    cases = [(work, p) for work in ("training", "inference") for p in ("0", "0.3", "0.5")]
    return [
        " | ".join([name, *(times[case] for case in cases)]) + " |" for name, times in found.items()
    ]


def test_speeds_of_families_are_the_committed_rows():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| \S+, AVX\w+ \|.*$", page, re.M)
    assert shown == family_lines(), "they are: python tests/docs/test_site.py"


if __name__ == "__main__":
    print("\n".join(speed_tables()[-1] + family_lines()))
