"""How many requests checkpoints in an object store take, whatever the number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zero2all.base.paths as paths
from tests.checkpoint.helpers import TRAINING_STATE
from zero2all.base.paths import RemotePath, to_path
from zero2all.checkpoint import CheckpointStore, RankGroup
from zero2all.checkpoint.training_state import UNKNOWN_LINEAGE

FILES = 60


class CountingStore:
    """Counts the calls of a file system, and marks objects as S3 does."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store, self._calls = store, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method) or name == "unstrip_protocol":
            return method

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            result = method(*args, **kwargs)
            if name == "find" and isinstance(result, dict):
                return {inner: self._marked(info) for inner, info in result.items()}
            return self._marked(result) if name == "info" else result

        return counted

    def _marked(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "ETag": str(hash(self._store.cat_file(info["name"])))}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    resolve = paths.resolve_store
    with monkeypatch.context() as patch:

        def counting(url: str) -> tuple[Any, str]:
            store, name = resolve(url)
            return CountingStore(store, calls), name

        patch.setattr(paths, "resolve_store", counting)
        yield calls


def fill(directory: RemotePath, steps: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for step in steps:
        for number in range(FILES):
            (directory / f"step-{step:08}" / f"__{number}_0.distcp").put(tmp_path / "file")
        (directory / f"step-{step:08}" / "manifest.json").put(tmp_path / "file")


def store_at(name: str) -> tuple[CheckpointStore, RemotePath]:
    pytest.importorskip("fsspec")
    directory = to_path(f"memory://{name}/checkpoints")
    return CheckpointStore(directory), directory


def test_checkpoints_are_listed_and_removed_in_a_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, directory = store_at("requests")
    fill(directory, (1, 2, 3), tmp_path)
    with counted(monkeypatch) as calls:
        assert checkpoints.steps() == [1, 2, 3]
    assert calls["ls"] == 1
    assert sum(calls.values()) == 1 + 3  # whether each has a manifest, however many files it has
    with counted(monkeypatch) as calls:
        checkpoints.remove(2)
    assert sum(calls.values()) <= 4
    assert calls["rm"] == 1
    assert checkpoints.steps() == [1, 3]
    assert CheckpointStore(directory / "nothing").steps() == []


def test_what_was_uploaded_is_not_downloaded_to_be_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, directory = store_at("etags")
    with counted(monkeypatch) as calls:
        checkpoints.write(1, {"a": torch.arange(4.0)}, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    assert calls["open"] == 0  # nothing is read back
    with counted(monkeypatch) as calls:
        assert CheckpointStore(directory).problem(1) is None
    assert (calls["find"], calls["open"]) == (1, 1)  # state.json, which is small
    shard = directory / "step-00000001" / "__0_0.distcp"
    data = shard.read_bytes()
    (tmp_path / "other").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    shard.put(tmp_path / "other")
    with counted(monkeypatch):
        problem = CheckpointStore(directory).problem(1)
    assert problem == "__0_0.distcp does not match its checksum"


@pytest.mark.slow
def test_a_real_store_gives_etags_and_deletes_in_bulk(s3: str, tmp_path: Path) -> None:
    directory = to_path(f"{s3}/checkpoints")
    checkpoints = CheckpointStore(directory)
    checkpoints.write(1, {"a": torch.arange(4.0)}, TRAINING_STATE, UNKNOWN_LINEAGE, RankGroup())
    assert checkpoints.steps() == [1]
    assert CheckpointStore(directory).problem(1) is None
    shard = directory / "step-00000001" / "__0_0.distcp"
    data = shard.read_bytes()
    (tmp_path / "other").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    shard.put(tmp_path / "other")
    assert CheckpointStore(directory).problem(1) == "__0_0.distcp does not match its checksum"
    checkpoints.remove(1)
    assert checkpoints.steps() == []
    assert directory.objects() == []
