"""Parallel text."""

from __future__ import annotations


def test_parallel_files_belong_together(distilled, parallel, bert, tmp_path, refused):
    short = tmp_path / "short.txt"
    short.write_text("Der Fluss.\n")
    argv = distilled(
        tmp_path / "out", bert / "model", "multilingual", **{**parallel, "translation": short}
    )
    refused(argv, "`translation` got", "1 lines", "expected 64")
