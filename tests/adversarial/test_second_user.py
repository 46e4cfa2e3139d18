"""Another user of the same machine: reads no weight, key or record, and leads no run astray by a planted link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adversarial.other_user import as_other_user, free_uid, needs_root, open_to_others
from tests.checkpoint.helpers import TRAINING_STATE, save, tiny_manager
from tests.conftest import tiny_recipe
from zero2all.base.io import host_id, staging_dir, write_text
from zero2all.checkpoint.slot_directories import claim_flash_directory
from zero2all.cluster.launch.job_secret import find_secret
from zero2all.recipe import recipe_yaml
from zero2all.track.http_server import load_key
from zero2all.train import Run

pytestmark = needs_root
DEAD = 4_000_000  # above the largest pid


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory as /tmp and /dev/shm are: everybody may make files there."""
    directory = Path(tempfile.mkdtemp(prefix="z2a-test-shared-", dir="/dev/shm"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What must still be there afterwards."""
    kept = tmp_path / "victim"
    kept.mkdir()
    (kept / "precious").write_text("mine")
    return kept


def test_the_other_user_finds_what_is_open(shared: Path) -> None:
    (shared / "open.txt").write_text("for all")
    (shared / "own.txt").write_text("private")
    (shared / "own.txt").chmod(0o600)
    assert open_to_others(shared) == [str(shared / "open.txt")]


def test_states_in_memory_keys_and_staged_uploads_are_closed(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.umask(0o000)  # the most careless one
    try:
        saved = tiny_manager(tmp_path, shared / f"z2a-key-{os.getuid()}")
        saved.begin_history(None)
        save(saved, 10)
        load_key(shared / "page.key")
        find_secret(shared / "job.secret", make=True)
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
        with staging_dir() as staged, tempfile.TemporaryDirectory(prefix="z2a-agent-"):
            write_text(staged / "weights", "private")
            assert open_to_others(shared) == []
        assert list(shared.rglob("slot-*.bin")), "there was something to find"
    finally:
        os.umask(0o022)


PLANT = """
kind, place, victim, uid = sys.argv
if kind == "link":
    os.symlink(victim, place)
elif kind == "fifo":
    os.mkdir(place); os.mkfifo(place + "/run")
elif kind == "endless":
    os.mkdir(place); os.symlink("/dev/zero", place + "/run")
else:
    os.mkdir(place); open(place + "/run", "w").write("/nowhere\\n"); os.symlink(victim, place + "/rank")
    for path in (place + "/run", place):
        os.utime(path, (1, 1))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "fifo", "endless", "abandoned"])
def test_what_is_planted_in_shared_memory_is_left_alone(kind: str, shared: Path, victim: Path, tmp_path: Path) -> None:
    as_other_user(PLANT, kind, shared / f"z2a-planted-{os.getuid()}", victim, "0")
    claim_flash_directory(shared / f"z2a-mine-{os.getuid()}", tmp_path)
    assert (victim / "precious").read_text() == "mine"
    assert os.path.lexists(shared / f"z2a-planted-{os.getuid()}")


def test_a_directory_that_is_planted_in_the_place_of_ours_is_refused(
    shared: Path, victim: Path, tmp_path: Path
) -> None:
    place = shared / f"z2a-key-{os.getuid()}"
    as_other_user(PLANT, "link", place, victim, "0")
    saved = tiny_manager(tmp_path, place)
    saved.begin_history(None)
    saved.save(10, TRAINING_STATE, durable=False)
    assert [path.name for path in victim.iterdir()] == ["precious"]


@pytest.mark.parametrize("kind", ["link", "abandoned"])
def test_what_is_planted_in_the_temporary_directory_is_left_alone(
    kind: str, shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero2all.base import io

    places = [shared / f".z2a.{name}-{host_id()}-{DEAD}-0123abcd" for name in ("staging", "old")]
    for place in places:
        as_other_user(PLANT, kind, place, victim, "0")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    io.remove_stale_staging.__wrapped__()
    assert (victim / "precious").read_text() == "mine"
    assert all(os.path.lexists(place) for place in places)
    assert not (shared / "z2a").exists()


@pytest.mark.long
def test_a_running_job_is_closed_to_another_user(workspace: Path, shared: Path, tmp_path: Path) -> None:
    """With the usual umask: what lies in shared memory and the temporary directory, and the key of the run."""
    temporary = Path(tempfile.mkdtemp(prefix="z2a-test-tmp-"))
    temporary.chmod(0o1777)
    out = temporary / "out"
    options = ["train.steps=2000", "checkpoint.every=100000 steps", "checkpoint.flash_every=2 steps"]
    recipe = tiny_recipe(workspace, f"out={out}", *options, f"checkpoint.flash_dir={shared}")
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    words = ["launch", "--nproc-per-node", "2", "--", "train", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(
        [sys.executable, "-m", "zero2all.cli", *words], env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, umask=0o022,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not list(shared.rglob("slot-*.json")):
            assert process.poll() is None, "it has ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        run = Run.open(recipe.run_dir).directory
        found = [path for path in open_to_others(shared, temporary) if not path.startswith(f"{out}/")]
        assert found == []
        assert str(run / "key") not in open_to_others(out)
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(temporary)


def test_the_other_user_is_nobody_here() -> None:
    assert as_other_user("print(os.getuid(), os.geteuid())").split() == [str(free_uid())] * 2
