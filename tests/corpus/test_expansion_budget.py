"""Many small bombs in one source: its budget refuses the rest, and what is honest never meets it."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from zero2all.corpus import BuiltCorpus, build_corpus, expansion_budget, part_files
from zero2all.corpus.part_files import OVER_BUDGET
from zero2all.corpus.readers import ReadLimits
from zero2all.engine import Engine
from zero2all.recipe import CorpusRecipe, SourceRecipe

BOMBS, BOMB_BYTES = 10, 4_000_000
RATIO = "unpacks to more than 250 times its size"


@pytest.fixture
def bombs(tmp_path: Path) -> Path:
    """Each is below the size from which one file is checked."""
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(BOMBS):
        line = b'{"text": "%d %s"}\n' % (number, b"x" * 10_000)
        (raw / f"{number}.jsonl.gz").write_bytes(gzip.compress(line * (BOMB_BYTES // len(line))))
    return raw


def built(raw: Path, out: Path, engine: Engine | None = None, **limits: Any) -> BuiltCorpus:
    source = SourceRecipe(name="raw", paths=[str(raw)])
    recipe = CorpusRecipe(sources=[source], filters=[], holdout=0, **limits)
    return build_corpus(recipe, out, engine)


def refused(manifest: BuiltCorpus) -> dict[str, int]:
    return {reason: found.count for reason, found in manifest.left_out["raw"].files.items()}


def test_the_rest_of_a_source_of_bombs_is_counted_and_not_read(
    bombs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "SMALL_FILE_BYTES", 0)  # each is a part of its own
    monkeypatch.setattr(expansion_budget, "UNCHECKED_BYTES", 10_000_000)
    manifest = built(bombs, tmp_path / "documents", max_compression_ratio=50)
    assert refused(manifest) == {OVER_BUDGET: 7}, "after the third, 12 MB are over the 10 MB"
    assert 10_000_000 < manifest.sources["raw"].read.bytes < 10_000_000 + BOMB_BYTES
    assert built(bombs, tmp_path / "documents", max_compression_ratio=50).reused, "the same again is not tried again"
    monkeypatch.setattr(expansion_budget, "UNCHECKED_BYTES", 20_000_000)
    more = built(bombs, tmp_path / "documents", max_compression_ratio=51)
    assert refused(more) == {OVER_BUDGET: 5}, "with another budget it is"
    assert refused(built(bombs, tmp_path / "documents", max_compression_ratio=1000)) == {}


def test_a_part_of_small_bombs_stops_by_itself(bombs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "GROUP_FILES", 1 << 60)  # all in one part
    monkeypatch.setattr(part_files, "PART_LIMITS", ReadLimits(ratio_check_bytes=10_000_000))
    manifest = built(bombs, tmp_path / "documents")
    assert refused(manifest) == {RATIO: 7}, "the fourth is cut off, the others are not opened"
    assert manifest.sources["raw"].read.bytes < 5 * BOMB_BYTES


def test_an_archive_of_small_bombs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    raw = tmp_path / "raw"
    raw.mkdir()
    with zipfile.ZipFile(raw / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(BOMBS):
            archive.writestr(f"{number}.txt", f"{number} {'x' * 10_000}\n" * (BOMB_BYTES // 10_000))
    monkeypatch.setattr(part_files, "PART_LIMITS", ReadLimits(ratio_check_bytes=10_000_000))
    manifest = built(raw, tmp_path / "documents")
    assert refused(manifest) == {RATIO: 1}
    assert manifest.sources["raw"].read.bytes < 5 * BOMB_BYTES


@pytest.mark.parametrize("workers", [1, 2])
def test_honest_text_that_compresses_well_is_all_there(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs: fifty times smaller, and no allowance for small sources."""
    rng, raw = random.Random(3), tmp_path / "raw"
    raw.mkdir()
    text = {}
    for number in range(6):
        line = "2026-01-01T00:00:00 service started and waits for connections on its port without any trouble at all\n"
        text[number] = "".join(line * 6 + f"{rng.randrange(10**9)}\n" for _ in range(600))
        (raw / f"{number}.txt.gz").write_bytes(gzip.compress(text[number].encode()))
    stored = sum(path.stat().st_size for path in raw.iterdir())
    assert 40 < sum(map(len, text.values())) / stored < 100
    monkeypatch.setattr(expansion_budget, "UNCHECKED_BYTES", 1)
    manifest = built(raw, tmp_path / "documents", Engine(workers=workers))
    assert refused(manifest) == {}
    shards = (tmp_path / "documents").glob("*/*.parquet")
    assert sorted(one for shard in shards for one in pq.read_table(shard)["content"].to_pylist()) == sorted(
        text.values()
    )
