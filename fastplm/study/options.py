"""The options of ``fastplm study``. Nothing here imports PyTorch."""

from __future__ import annotations

import argparse
from typing import Any

from fastplm.run.settings import THREADS, integer

#: The folder of all cells, which studies share.
CELLS = "runs/cells"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastplm study`` to its parser."""
    help = "file of a grid, or the name of a study that comes with the library"
    parser.add_argument("study", metavar="NAME|FILE", help=help)
    # Without a default of its own an option has none to show.
    none: dict[str, Any] = {"default": argparse.SUPPRESS}
    help = "one of the sizes in the file (default: its first one)"
    parser.add_argument("--size", metavar="NAME", help=help, **none)
    help = "folder of the files that the study names (default: that of FILE)"
    parser.add_argument("--data", metavar="DIR", help=help, **none)
    help = "folder of table, picture and claims (default: runs/studies/NAME-SIZE)"
    parser.add_argument("--out", dest="folder", metavar="DIR", help=help, **none)
    help = "folder of all cells, which studies share"
    parser.add_argument("--cells", metavar="DIR", default=CELLS, help=help)
    help = "folder of vocabularies and token ids (default: ~/.cache/fastplm)"
    parser.add_argument("--cache", metavar="DIR", help=help, **none)
    help = "cells that run at once (default: as many as the cores allow)"
    parser.add_argument("--jobs", type=integer(1, 10_000), metavar="N", help=help, **none)
    help = "CPU threads of each cell; another number makes other cells"
    parser.add_argument("--threads", type=THREADS, metavar="N", default=1, help=help)
    help = "print the cells, their FLOPs and the hours, and run nothing"
    parser.add_argument("--dry-run", action="store_true", help=help, **none)
    help = "more options of Snakemake, such as '--executor slurm --jobs 20'"
    parser.add_argument("--engine", metavar="OPTIONS", help=help, **none)
