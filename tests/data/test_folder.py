"""Atomic writes, manifests and caches: what is damaged is built again, and one line says so."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastplm.data import (
    PackedDocuments,
    SentenceChunks,
    TokenStore,
    _folder,
    read_documents,
    tokenize,
    train_tokenizer,
)
from fastplm.errors import DataError

KINDS = ("flip", "old-time", "cut", "empty", "longer", "gone", "folder", "dangling")


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "a.txt"
    path.write_text("\n\n".join(documents))
    return path


def results(corpus: Path, cache: Path, kind: str = "wordpiece") -> str:
    """A hash of all that training reads: vocabulary, ids, boundaries, runs and blocks."""
    documents = read_documents([corpus], cache=cache)
    tokenizer = train_tokenizer(documents, 300, cache, kind)
    store = tokenize(documents, tokenizer, cache)
    read = [tokenizer.backend_tokenizer.to_str().encode()]
    for part in store, *store.split(0.2):
        chunks, packed = SentenceChunks(part, 32), PackedDocuments(part, 32)
        read += [part.tokens, part.sentences, part.documents]
        read += [chunks.begin, chunks.end, chunks.document]
        read += [packed[i]["input_ids"].numpy() for i in range(len(packed))]
    digest = hashlib.sha256()
    for data in read:
        digest.update(data if isinstance(data, bytes) else data.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module", params=["wordpiece", "unigram"])
def whole(request, corpus, tmp_path_factory) -> tuple[str, str, Path]:
    cache = tmp_path_factory.mktemp("whole")
    return request.param, results(corpus, cache, request.param), cache


def spoil(file: Path, kind: str, chance: random.Random) -> None:
    data, times = file.read_bytes(), file.stat()
    place = chance.randrange(len(data))
    flipped = bytes([data[place] ^ 1 << chance.randrange(8)])
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind != "gone":
        changed = data[:place] + flipped + data[place + 1 :]
        other = {"cut": data[:place], "empty": b"", "longer": data + flipped}
        file.write_bytes(other.get(kind, changed))
        if kind == "old-time":  # a failing disk may return older contents
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def check_faults(whole, corpus, folder, capsys, number: int) -> None:
    kind, expected, cache = whole
    chance = random.Random(number)
    copied = folder / str(number)
    shutil.copytree(cache, copied)
    files = sorted(path for path in copied.rglob("*") if path.is_file())
    file, damage = files[number % len(files)], KINDS[number // len(files) % len(KINDS)]
    spoil(file, damage, chance)
    capsys.readouterr()
    assert results(corpus, copied, kind) == expected, (file, damage)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the cache {file.parent} is damaged" in line and "built again" in line
    # Now the cache is complete, and no other file is left.
    assert results(corpus, copied, kind) == expected
    assert capsys.readouterr().err == ""
    assert not [path for path in copied.rglob(".*")]
    shutil.rmtree(copied)


@pytest.mark.slow
def test_files_of_a_cache_are_damaged(whole, corpus, tmp_path, capsys):
    """Damages every file once, in a random way."""
    _, _, cache = whole
    files = sum(path.is_file() for path in cache.rglob("*"))
    assert files > 20
    for number in range(files):
        kind = random.Random(number).randrange(len(KINDS))
        check_faults(whole, corpus, tmp_path, capsys, number + kind * files)


def test_caches_of_older_versions_and_foreign_files(whole, corpus, tmp_path, capsys):
    kind, expected, cache = whole
    shutil.copytree(cache, tmp_path / "cache")
    (store,) = tmp_path.glob("cache/tokens-*")
    (tokenizer,) = tmp_path.glob(f"cache/{kind}-*")
    (store / "manifest.json").unlink()
    (tokenizer / "added_tokens.json").write_text('{"anna": 7}')  # Transformers would read it
    (tokenizer / ".DS_Store").write_text("")  # Transformers would not read it
    assert results(corpus, tmp_path / "cache", kind) == expected
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert f"{tokenizer} is damaged (added_tokens.json was not written with it)" in lines[0]
    assert f"{store} is damaged (there is no manifest.json" in lines[1]


def test_a_file_where_the_folder_was(tmp_path, capsys):
    (tmp_path / "key").write_text("no folder")
    folder = _folder.build_once(tmp_path, "key", write)
    assert (folder / "a.bin").stat().st_size == 9000
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert os.listdir(tmp_path) == ["key"]


def test_a_store_is_checked_that_is_opened_by_its_folder(whole, tmp_path):
    _, _, cache = whole
    (store,) = cache.glob("tokens-*")
    shutil.copytree(store, tmp_path / "store", ignore=shutil.ignore_patterns("valid-*"))
    TokenStore(tmp_path / "store").validate()
    data = bytearray((store / "tokens.bin").read_bytes())
    data[40] ^= 1  # another token of the vocabulary
    (tmp_path / "store" / "tokens.bin").write_bytes(data)
    with pytest.raises(DataError, match="tokens.bin has other contents.*Delete the folder"):
        TokenStore(tmp_path / "store").validate()


def write(folder: Path) -> None:
    (folder / "a.bin").write_bytes(random.Random(0).randbytes(9000))


def test_pages_of_large_files(tmp_path, monkeypatch):
    """The full hash finds a bit flipped between two pages; the file's changed time asks for it."""
    monkeypatch.setattr(_folder, "_LARGE", 8999)
    monkeypatch.setattr(_folder, "_PAGES", 2)
    monkeypatch.setattr(_folder, "_PAGE", 100)
    folder = _folder.build_once(tmp_path, "key", write)
    file = folder / "a.bin"
    data, times = file.read_bytes(), file.stat()

    def damage(place: int, *, touched: bool) -> str | None:
        file.write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        if not touched:
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return _folder.verify(folder, cache=True)

    assert damage(10, touched=True) == damage(8999, touched=False) == "a.bin has other contents"
    assert damage(10, touched=False) is None
    file.write_bytes(data[:-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert _folder.verify(folder, cache=True) == "a.bin has 8999 bytes of 9000"
    file.write_bytes(data)
    assert _folder.verify(folder, cache=True) is None


def test_concurrent_builders_and_readers(tmp_path):
    """Each thread opens its own lock file, so threads can stand for processes."""
    expected = random.Random(0).randbytes(9000)

    def use(number: int) -> bool:
        folder = _folder.build_once(tmp_path, "key", write)
        return (folder / "a.bin").read_bytes() == expected

    def spoilt(number: int) -> None:
        spoil(tmp_path / "key" / "a.bin", "old-time", random.Random(number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))
        inode = (tmp_path / "key").stat().st_ino
        assert all(pool.map(use, range(64)))
        assert (tmp_path / "key").stat().st_ino == inode, "a whole folder is not replaced"
        for number in range(10):
            spoilt(number)
            assert all(pool.map(use, range(8)))
    assert os.listdir(tmp_path) == ["key"]


def test_readers_wait_while_a_folder_is_replaced(tmp_path, capsys):
    file = _folder.build_once(tmp_path, "key", write) / "a.bin"
    data = file.read_bytes()
    with _folder.locked(tmp_path):
        file.write_bytes(b"half")
        thread = threading.Thread(target=_folder.build_once, args=(tmp_path, "key", write))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        file.write_bytes(data)
    thread.join(60)
    assert not thread.is_alive() and capsys.readouterr().err == ""


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    for name in (".key-abandoned", ".key-building", ".other-abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(b"half")
    with _folder.locked(tmp_path / ".key-building"):
        _folder.build_once(tmp_path, "key", write)
    assert sorted(os.listdir(tmp_path)) == [".key-building", ".other-abandoned", "key"]


def test_a_full_disk(tmp_path):
    def full(folder: Path) -> None:
        with open("/dev/full", "wb") as file:
            file.write(b"x" * 10_000)

    with pytest.raises(DataError, match="No space left on device.*--cache DIR"):
        _folder.build_once(tmp_path, "key", full)
    assert os.listdir(tmp_path) == []


def test_a_disk_with_no_room_for_a_map(whole, tmp_path, monkeypatch):
    """A write to such a map would kill the process, so the disk space is checked before."""

    def full(descriptor: int, begin: int, size: int) -> None:
        assert size % 24 == 0 < size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (store,) = whole[2].glob("tokens-*")
    shutil.copytree(store, tmp_path / "store", ignore=shutil.ignore_patterns("chunks-*"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match="No space left on device"):
        SentenceChunks(TokenStore(tmp_path / "store"), 32)


def test_a_rebuild_that_fails_leaves_what_is_there(tmp_path, capsys):
    folder = _folder.build_once(tmp_path, "key", write)
    (folder / "a.bin").write_bytes(b"damaged")

    def fails(folder: Path) -> None:
        raise DataError("no corpus any more")

    with pytest.raises(DataError, match="no corpus"):
        _folder.build_once(tmp_path, "key", fails)
    assert os.listdir(tmp_path) == ["key"]
    assert (folder / "a.bin").read_bytes() == b"damaged"


def test_a_manifest_has_sizes_and_hashes(tmp_path):
    folder = _folder.build_once(tmp_path, "key", lambda f: (f / "a").write_bytes(b"abc") and None)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["a"]["hash"] == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert manifest["files"]["a"]["size"] == 3
    manifest["files"]["a"]["changed"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert _folder.verify(folder, cache=True) == "manifest.json is not what was written"
