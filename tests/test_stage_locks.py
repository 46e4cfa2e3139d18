"""Stages that run at the same time with the same output: one after the other, and each as if it ran alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from zero2all.base import directory_lock
from zero2all.base.directory_lock import lock_output
from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, SourceRecipe, TokenizerRecipe, TokensRecipe
from zero2all.tokenizer import train_tokenizer
from zero2all.tokens import build_tokens

BUILD = """
import sys, time
from pathlib import Path
from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, SourceRecipe
raw, out, go = map(Path, sys.argv[1:])
recipe = CorpusRecipe(sources=[SourceRecipe(name="raw", paths=[str(raw)])], filters=[], holdout=0)
print("ready", flush=True)
while not go.exists():
    time.sleep(0.01)
build_corpus(recipe, out)
"""


def write_texts(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(20):
        texts = [{"text": f"{word} {number} {line} of a text that is long enough to keep"} for line in range(200)]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def digests(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())["files"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", [["a", "a", "a"], ["a", "b"]])
def test_corpus_builds_at_the_same_time(tmp_path: Path, words: list[str]) -> None:
    raw = {word: write_texts(tmp_path / f"raw-{word}", word) for word in set(words)}
    alone = {}
    for word, folder in raw.items():
        recipe = CorpusRecipe(sources=[SourceRecipe(name="raw", paths=[str(folder)])], filters=[], holdout=0)
        build_corpus(recipe, tmp_path / f"alone-{word}")
        alone[word] = digests(tmp_path / f"alone-{word}")
    out, go = tmp_path / "documents", tmp_path / "go"
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(raw[word]), str(out), str(go)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for word in words
    ]  # fmt: skip
    for build in builds:
        assert build.stdout is not None
        assert build.stdout.readline() == "ready\n"
    go.touch()
    for build in builds:
        _, said = build.communicate(timeout=300)
        assert build.returncode == 0, said
    assert digests(out) in alone.values()


def run_together(stage: Callable[[], object]) -> list[Any]:
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(lambda: (barrier.wait(), stage())[1]) for _ in range(2)]
        return [future.result(timeout=300) for future in futures]


def test_tokenizers_and_token_stores_at_the_same_time(workspace: Path, tmp_path: Path) -> None:
    documents = workspace / "documents"
    recipe = TokenizerRecipe(vocab_size=448)
    built = run_together(lambda: train_tokenizer(recipe, documents, tmp_path / "tokenizer"))
    assert sorted(one.reused for one in built) == [False, True]
    stores = run_together(lambda: build_tokens(TokensRecipe(), documents, tmp_path / "tokenizer", tmp_path / "tokens"))
    assert sorted(one.reused for one in stores) == [False, True]


def test_a_stage_that_waits_names_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(directory_lock, "TELL_AFTER", 0.0)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/z2a", "corpus", "build", "my.yaml", "key=https://u:secret@host"])
    entered = threading.Event()

    def wait() -> None:
        with lock_output(tmp_path / "documents", "corpus build"):
            entered.set()

    with lock_output(tmp_path / "documents", "corpus build"):
        thread = threading.Thread(target=wait)
        thread.start()
        said, end = "", time.monotonic() + 30
        while "waiting" not in said:
            assert time.monotonic() < end
            said += capfd.readouterr().err
            time.sleep(0.02)
        assert not entered.is_set()
    assert entered.wait(30)
    thread.join()
    assert f"process {os.getpid()} on" in said
    assert "z2a corpus build my.yaml" in said
    assert "secret" not in said


def test_an_output_that_cannot_be_written_needs_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with lock_output(tmp_path / "documents", "corpus build"):
        assert list(tmp_path.iterdir()) == []
