"""Files survive a power failure, and leftovers are removed only when nobody writes them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import zero2all.base.io as io
from zero2all.base.io import atomic_dir, atomic_path, staging_dir
from zero2all.base.manifest import write_manifest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records fsync and rename calls, in order."""
    seen: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor: int) -> None:
        seen.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split("-")[0]))
        fsync(descriptor)

    def moved(function: object) -> object:
        def move(source: object, target: object) -> None:
            seen.append(("rename", os.path.basename(str(target)).split("-")[0]))
            function(source, target)  # type: ignore[operator]

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", moved(rename))
    monkeypatch.setattr(os, "replace", moved(replace))
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_file_and_its_name_are_on_disk(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    with atomic_path(tmp_path / "a.json") as partial:
        partial.write_text("{}")
    directory = tmp_path.name.split("-")[0]
    assert calls == [("sync", ".a.json.partial"), ("rename", "a.json"), ("sync", directory)]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_all_files_of_a_directory_are_on_disk_before_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    with atomic_dir(tmp_path / "out", "things") as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "data").write_bytes(b"x")
        write_manifest(partial, "things", {})
        calls.clear()
    renamed = calls.index(("rename", "out"))
    before = {name for _, name in calls[:renamed]}
    assert {"data", "inner", "manifest.json", ".out.partial"} <= before
    assert calls[renamed + 1 :] == [("sync", tmp_path.name.split("-")[0])]


def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def some(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", some)
    with atomic_path(tmp_path / "a") as partial:
        partial.write_text("a")
    assert (tmp_path / "a").read_text() == "a"


def test_two_writers_of_one_file_never_share_a_partial(tmp_path: Path) -> None:
    """Two hosts, or two containers, may have the same process id."""
    with atomic_path(tmp_path / "a") as one, atomic_path(tmp_path / "a") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "a").read_text() == "one"
    assert os.listdir(tmp_path) == ["a"]


def killed_while_writing(target: Path) -> Path:
    code = "import os, sys; from pathlib import Path; from zero2all.base.io import atomic_dir\n"
    code += "with atomic_dir(Path(sys.argv[1]), 'things') as partial: print(partial, flush=True); os._exit(9)"
    done = subprocess.run([sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip())


def make(target: Path) -> None:
    with atomic_dir(target, "things") as partial:
        write_manifest(partial, "things", {})


def test_leftovers_of_a_killed_process_of_this_host_are_removed(tmp_path: Path) -> None:
    left = killed_while_writing(tmp_path / "out")
    assert left.exists()
    make(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_files_of_another_host_are_kept_until_they_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed_while_writing(tmp_path / "out")  # its process id is free here, but means nothing elsewhere
    (left / "part").write_text("x")
    monkeypatch.setattr(io, "host_id", lambda: "0badcafe")
    make(tmp_path / "out")
    assert left.exists()
    for path in (left / "part", left):
        os.utime(path, (1, 1))
    make(tmp_path / "out")
    assert not left.exists()


def test_files_of_another_thread_of_this_process_are_kept(tmp_path: Path) -> None:
    inside, done = threading.Event(), threading.Event()

    def slow() -> None:
        with staging_dir() as directory:
            (directory / "part").write_text("x")
            inside.set()
            done.wait(60)
            found.append((directory / "part").exists())

    found: list[bool] = []
    thread = threading.Thread(target=slow)
    thread.start()
    assert inside.wait(60)
    io.remove_stale_staging.__wrapped__()
    done.set()
    thread.join()
    assert found == [True]


def test_staging_of_a_process_with_the_same_id_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the trainer is often process 1, every time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with staging_dir() as directory:
        name = directory.name
    (tmp_path / f"{name[:-8]}00000000").mkdir()
    io.remove_stale_staging.__wrapped__()
    assert os.listdir(tmp_path) == []


def test_a_replacement_that_is_killed_midway_loses_nothing(tmp_path: Path) -> None:
    make(tmp_path / "out")
    left = killed_while_writing(tmp_path / "out")
    mark = left.name.partition("partial-")[2]
    (tmp_path / "out").rename(tmp_path / f".out.old-{mark}")
    with pytest.raises(RuntimeError), atomic_dir(tmp_path / "out", "things"):
        raise RuntimeError  # the new one fails too
    assert os.listdir(tmp_path) == ["out"]


def test_a_forged_name_with_an_impossible_process_id_breaks_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may make directories in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for pid in ("9" * 20, "0"):
        planted = Path(f".z2a.staging-{io.host_id()}-{pid}-00000000")
        assert io._is_abandoned(planted)
    (tmp_path / f".z2a.staging-{io.host_id()}-{'9' * 20}-00000000").mkdir()
    io.remove_stale_staging.cache_clear()
    with staging_dir() as directory:
        assert directory.exists()
