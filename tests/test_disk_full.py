"""A full disk: one line that names the path and the remedy, and a rerun that works."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import zero2all.cli.conventions as conventions
from tests.conftest import tiny_recipe
from zero2all.base.errors import Z2aError
from zero2all.base.io import atomic_dir, atomic_path, disk_full_error, write_text
from zero2all.cli.main import app
from zero2all.recipe import recipe_yaml
from zero2all.train import Run, train


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 KB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk to test on: mounting one needs root ({mounted.stderr.decode().strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def z2a(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    return done.exit_code, json.loads(done.stdout).get("error", "")


def expect(error: str, place: Path, mount: Path | None = None) -> None:
    """``mount`` is the full file system, if there really is one."""
    assert "no space left" in error
    if mount is not None:
        assert re.search(rf"[\d.]+K?B free of 49\.15KB on {mount} is not enough", error), error
    assert str(place) in error
    assert "run the same command again" in error
    assert "bug" not in error
    assert "\n" not in error


def test_export(tiny_run: Run, tmp_path: Path, small: Path) -> None:
    code, error = z2a("export", tiny_run.directory, "--to", small / "hf")
    assert code == 1
    expect(error, small / "hf", small)
    assert os.listdir(small) == []
    assert z2a("export", tiny_run.directory, "--to", tmp_path / "hf")[0] == 0


def test_tokenizer_train(workspace: Path, tmp_path: Path, small: Path) -> None:
    recipe = tiny_recipe(workspace, f"tokenizer.dir={small}/tokenizer")
    write_text(tmp_path / "recipe.yaml", recipe_yaml(recipe))
    code, error = z2a("tokenizer", "train", tmp_path / "recipe.yaml", "--workers", 1)
    assert code == 1
    expect(error, small, small)


def test_checkpoint(workspace: Path, tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = (f"out={tmp_path}/out", f"checkpoint.dir={small}/checkpoints")
    with pytest.raises(Z2aError) as caught:
        train(tiny_recipe(workspace, *places, "train.steps=2", "checkpoint.every=1 steps"))
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "a checkpoint could not be written" in line]
    for step, message in ((1, warning), (2, str(caught.value))):
        assert f"could not be written: no space left for {small}/checkpoints/step-0000000{step}: " in message
        assert f"on {small} is not enough, at least " in message
    needed = re.search(r"at least ([\d.]+)KB are needed", str(caught.value))
    assert needed is not None
    assert float(needed[1]) > 49.15, "more than the disk has"
    assert "the last checkpoint could not be written" in str(caught.value)
    assert str(caught.value).count("run the same command again") == 1


def torch_error() -> Exception:
    """What torch.save raises: an error of its own, while it handles that of the disk."""
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("262144 requested and 8064 written"),
        torch_error(),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_whatever_error_a_library_raises(failure: Exception, tmp_path: Path) -> None:
    with pytest.raises(Z2aError) as caught, atomic_path(tmp_path / "a"):
        raise failure
    expect(str(caught.value), tmp_path / "a")
    with (
        pytest.raises(Z2aError) as caught,
        atomic_dir(tmp_path / "out", "things") as partial,
        atomic_path(partial / "inner"),
    ):
        raise failure
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # workers send it
    expect(str(caught.value), tmp_path / "out")
    assert "partial" not in str(caught.value)
    assert ("quota of this user" in str(caught.value)) == ("quota" in str(failure))
    assert os.listdir(tmp_path) == []


def test_other_errors_are_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"), atomic_path(tmp_path / "a"):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(ZeroDivisionError), atomic_dir(tmp_path / "out", "things"):
        raise ZeroDivisionError


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_outside_of_atomic_writes_too() -> None:
    @conventions.command
    def fill(json: bool = False) -> conventions.Result:
        with open("/dev/full", "wb") as stream:
            np.zeros(1 << 16).tofile(stream)
        raise AssertionError

    import typer

    application = typer.Typer()
    application.command()(fill)
    done = CliRunner().invoke(application, [])
    assert done.exit_code == 1
    assert "no space left for what was being written; free some" in done.output


def test_a_disk_without_inodes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_files=1000, f_favail=0, f_frsize=4096, f_bavail=10**6, f_blocks=10**7)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    error = disk_full_error(tmp_path / "a" / "b", OSError(errno.ENOSPC, "No space left on device"))
    assert re.search(r"no space left for .*/a/b: / has no inodes|has no inodes left", str(error))
