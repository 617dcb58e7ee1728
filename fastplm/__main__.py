"""``python -m fastplm``: the command line."""

from fastplm.cli import main

raise SystemExit(main())
