"""A corpus build that is killed, on any number of workers, ends with the same bytes as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import write_raw
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, DedupRecipe, SourceRecipe

KILLS = int(os.environ.get("Z2A_TEST_KILLS", "3"))
BUILDER = """
import json, sys
from zero2all.corpus import build_corpus
from zero2all.base.tasks import TaskEngine
from zero2all.base.paths import to_path
from zero2all.recipe import CorpusRecipe

if __name__ == "__main__":
    recipe = CorpusRecipe.model_validate(json.loads(sys.argv[1]))
    build_corpus(recipe, to_path(sys.argv[2]), TaskEngine(workers=int(sys.argv[3])))
"""


def recipe_for(raw: Path) -> CorpusRecipe:
    sources = [SourceRecipe(name="en", paths=[str(raw / "en.jsonl")])]
    sources += [SourceRecipe(name=name, paths=[str(raw / name)]) for name in ("zh", "code")]
    return CorpusRecipe(
        sources=sources, holdout=0.1, shard_size=20_000, filters=["normalize"], dedup=DedupRecipe(near=True)
    )


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("raw")
    write_raw(root / "raw")
    lines = (root / "raw" / "en.jsonl").read_text().splitlines()
    with open(root / "raw" / "en.jsonl", "a") as stream:  # the same records again: one gid, one document
        stream.write("\n".join(lines[:20]) + "\n")
    return root / "raw"


@pytest.fixture(scope="module")
def undisturbed(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "documents"
    build_corpus(recipe_for(raw), out)
    return contents(out)


def test_none_is_lost_and_none_is_there_twice(raw: Path, tmp_path: Path) -> None:
    manifest = build_corpus(recipe_for(raw), tmp_path / "documents")
    gids = [
        gid for path in (tmp_path / "documents").rglob("*.parquet") for gid in pq.read_table(path)["gid"].to_pylist()
    ]
    assert len(gids) == len(set(gids)) == manifest.documents
    read = sum(account.read.documents for account in manifest.sources.values())
    dropped = sum(part.documents for a in manifest.sources.values() for part in a.dropped.values())
    assert read == len(gids) + dropped
    assert manifest.sources["en"].dropped["exact copy"].documents >= 20


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    workers: int, raw: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    build_corpus(recipe_for(raw), tmp_path / "documents", TaskEngine(workers=workers))
    assert contents(tmp_path / "documents") == undisturbed


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    raw: Path, undisturbed: dict[str, bytes], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The moment is a number of files in the work directory, so that it falls into every stage."""
    out = tmp_path / "documents"
    work = tmp_path / "documents.work"
    rng = random.Random(3)
    words = [sys.executable, "-c", BUILDER, json.dumps(recipe_for(raw).model_dump(mode="json")), str(out)]
    kills = 0
    for moment in sorted(rng.sample(range(1, 260), KILLS)):
        process = subprocess.Popen([*words, str(rng.choice([1, 2]))], start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and sum(1 for _ in work.rglob("*")) < moment:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # polls; what decides is the number of files
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    subprocess.run([*words, "2"], check=True, timeout=120)
    assert kills >= KILLS // 2
    assert contents(out) == undisturbed
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "documents.work"}
    record_property("cases", kills)
