"""A corpus build that is killed, on any number of workers, ends with the same bytes as one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import write_raw
from tests.corpus.builds import corpus_of, rows_of, source_of
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.recipe import CorpusRecipe, DedupRecipe

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
    sources = (source_of(raw / path, name) for name, path in (("en", "en.jsonl"), ("zh", "zh"), ("code", "code")))
    return corpus_of(*sources, holdout=0.1, shard_size=20_000, filters=["normalize"], dedup=DedupRecipe(near=True))


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def write_raw_with_copies(root: Path) -> None:
    write_raw(root)
    lines = (root / "en.jsonl").read_text().splitlines()
    with open(root / "en.jsonl", "a") as stream:  # the same records again: one gid, one document
        stream.write("\n".join(lines[:20]) + "\n")


def build_with_kills(
    recipe: CorpusRecipe, out: str, moments: list[int], files: Callable[[], int], environment: dict[str, str]
) -> int:
    """Kill a build when there are so many files, for each of the moments, and let the last one end; the kills."""
    rng = random.Random(3)
    words = [sys.executable, "-c", BUILDER, recipe.model_dump_json(), out]
    kills = 0
    for moment in moments:
        process = subprocess.Popen([*words, str(rng.choice([1, 2]))], start_new_session=True, env=environment)
        deadline = time.monotonic() + 90
        while process.poll() is None and files() < moment:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # polls; what decides is the number of files
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    subprocess.run([*words, "2"], check=True, timeout=120, env=environment)
    return kills


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("raw") / "raw"
    write_raw_with_copies(root)
    return root


@pytest.fixture(scope="module")
def undisturbed(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "documents"
    build_corpus(recipe_for(raw), out)
    return contents(out)


def test_none_is_lost_and_none_is_there_twice(raw: Path, tmp_path: Path) -> None:
    manifest = build_corpus(recipe_for(raw), tmp_path / "documents")
    gids = [row["gid"] for row in rows_of(tmp_path / "documents")]
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
    out, work = tmp_path / "documents", tmp_path / "documents.work"
    moments = sorted(random.Random(3).sample(range(1, 260), KILLS))
    kills = build_with_kills(
        recipe_for(raw), str(out), moments, lambda: sum(1 for _ in work.rglob("*")), {**os.environ}
    )
    assert kills >= KILLS // 2
    assert contents(out) == undisturbed
    assert {path.name for path in tmp_path.iterdir()} == {"documents", "documents.work"}
    record_property("cases", kills)
