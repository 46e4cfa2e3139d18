"""Files that would hang, crash or bloat a build: each is counted with its reason, and the rest is built."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from zero2all.corpus import build_corpus
from zero2all.corpus.readers import RawFile, Unreadable, read_records
from zero2all.recipe import CorpusRecipe, SourceRecipe

TEXT = "An ordinary text that is there to be read, and long enough to stay.\n" * 20


def built(raw: Path, out: Path, **source: Any) -> dict[str, Any]:
    recipe = CorpusRecipe(sources=[SourceRecipe(name="raw", paths=[str(raw)], **source)], filters=[], holdout=0)
    return build_corpus(recipe, out)


def files_left_out(manifest: dict[str, Any]) -> dict[str, list[str]]:
    return {reason: found["first"] for reason, found in manifest["left_out"]["raw"]["files"].items()}


@pytest.mark.timeout(20)
def test_fifos_sockets_and_devices_are_counted_not_opened(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "good.txt").write_text(TEXT)
    os.mkfifo(raw / "pipe.txt")
    (raw / "null.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(raw)  # the path of a socket may have 107 bytes
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)
        manifest = built(raw, tmp_path / "documents")
    assert manifest["sources"]["raw"]["read"]["documents"] == 1
    left_out = sorted(name for names in files_left_out(manifest).values() for name in names)
    assert left_out == ["null.txt", "pipe.txt", "socket.txt"]
    assert files_left_out(manifest)["link or device"][-2:] == ["pipe.txt", "socket.txt"]


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_fifo_after_it_was_listed_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    file = RawFile.at(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Unreadable, match="link or device"):
        list(read_records(file))


@pytest.mark.timeout(20)
def test_a_fifo_put_in_place_between_the_check_and_the_open_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    file, regular = RawFile.at(path), os.stat(path)
    path.unlink()
    os.mkfifo(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", lambda *_, **__: regular)  # what was seen before the swap
        with pytest.raises(Unreadable, match="link or device"):
            file.open()
