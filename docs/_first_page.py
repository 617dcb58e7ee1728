"""Hooks of MkDocs: the site's first page begins as README.md does, and options stay whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
ENDS_BEFORE = "\n## And then\n"


def first_screen(readme: str) -> str:
    """The README down to ``ENDS_BEFORE``, with links as they are from docs/."""
    head, end, _ = readme.partition(ENDS_BEFORE)
    if not end:
        raise ValueError(f"README.md has no heading {ENDS_BEFORE.strip()!r}")
    return head.replace("](docs/", "](")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != "index.md":
        return markdown
    return first_screen(README.read_text(encoding="utf-8")) + markdown


def on_page_content(html: str, **_: Any) -> str:
    """A line may end behind a hyphen, but not within ``--steps`` (see site.css)."""
    option = re.compile(r"-[\w-]+")
    whole = r'<span class="option">\g<0></span>'
    return re.sub(r"<code>[^<]*</code>", lambda code: option.sub(whole, code[0]), html)
