"""``.ci/long``: each phase runs alone, its result is kept, and what changed since its last green run is listed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import grimp
import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.suite import part_of_faults
from zero2all.base.errors import UsageError
from zero2all.bench.parity_cases import cases, select_cases

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("long_phases", ROOT / ".ci" / "long_phases.py")
assert _spec is not None
assert _spec.loader is not None
long_phases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(long_phases)


def git(clone: Path, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *words], cwd=clone, check=True, capture_output=True, text=True).stdout


def commit(clone: Path, path: str, text: str) -> str:
    (clone / path).parent.mkdir(parents=True, exist_ok=True)
    (clone / path).write_text(text)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", path)
    return git(clone, "rev-parse", "HEAD").strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the real scripts, and a model to cover."""
    shutil.copytree(ROOT / ".ci", tmp_path / "clone" / ".ci", ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    git(tmp_path / "clone", "init", "--quiet")
    commit(tmp_path / "clone", "src/zero2all/model/layers.py", "1")
    return tmp_path / "clone"


def status(clone: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in long_phases.must_run(clone))


def green(clone: Path, name: str) -> None:
    long_phases.record(clone, name, long_phases.state(clone), 60, 0)


def test_a_phase_counts_until_a_path_that_it_covers_changes(clone: Path) -> None:
    assert set(status(clone).values()) == {"never ran"}
    for name in long_phases.COVERS:
        green(clone, name)
    assert status(clone) == {}
    commit(clone, ".ci/notes.md", "and the results themselves")
    commit(clone, "src/zero2all/cli/watch.py", "not part of training")
    assert {"long", "attack", "fuzz/properties", "fuzz/readers"} == set(status(clone))
    commit(clone, "src/zero2all/base/units.py", "what every package imports")
    assert "src/zero2all/base/units.py" in status(clone)["parity/tensor"]
    assert set(status(clone)) == set(long_phases.COVERS)
    green(clone, "parity/tensor")
    assert "parity/tensor" not in status(clone)
    assert "parity/context" in status(clone)


def test_a_failure_a_changed_tree_and_a_lost_commit_do_not_count(clone: Path) -> None:
    before = long_phases.state(clone)
    long_phases.record(clone, "parity/tensor", before, 60, 124)
    assert "failed with exit status 124" in status(clone)["parity/tensor"]
    (clone / "src" / "zero2all" / "model" / "layers.py").write_text("2")
    green(clone, "chaos/1")
    assert "not committed" in status(clone)["chaos/1"]
    git(clone, "checkout", "--quiet", "--", "src")
    (clone / "conftest.py").write_text("a file that git does not know may change a test")
    green(clone, "attack")
    assert "not committed" in status(clone)["attack"]
    (clone / "conftest.py").unlink()
    assert long_phases.state(clone) == before, "the results are not a change"
    commit(clone, "src/zero2all/model/layers.py", "3")
    long_phases.record(clone, "torch", before, 60, 0)
    assert "not committed" in status(clone)["torch"], "a commit while the phase ran"
    green(clone, "long")
    results = json.loads((clone / ".ci" / "long-results.json").read_text())
    assert results["long"]["seconds"] == 60
    assert not results["long"]["dirty"]
    results["long"]["commit"] = "0" * 40
    (clone / ".ci" / "long-results.json").write_text(json.dumps(results))
    assert "not in this clone" in status(clone)["long"]


def test_the_script_runs_what_it_is_told_and_keeps_each_result(clone: Path, tmp_path: Path) -> None:
    """With a venv that is there already, and programs that only say how they were called."""

    def program(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    for name in ("pinned", "trl"):
        program(tmp_path / "venvs" / name / "bin" / "z2a", f'echo "{name} z2a $*"')
        program(tmp_path / "venvs" / name / "bin" / "pytest", f'echo "{name} pytest $*"')
        program(tmp_path / "venvs" / name / "bin" / "python", f'echo "{name} python $*"; [ "$2" != tests.chaos ]')
        (tmp_path / "venvs" / name / "ready").touch()
    program(tmp_path / "bin" / "apt-get", "exit 1")  # no packages of this system either
    environment = os.environ | {
        "Z2A_CI_VENVS": str(tmp_path / "venvs"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }

    def long(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(clone / ".ci" / "long"), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert long("no-such-phase").returncode != 0
    done = long("chaos/2", "parity/tensor", "fuzz/readers", "engines/trl")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "pinned z2a bench parity --out runs/long/parity-tensor --only TP*" in lines
    assert "pinned python -m tests.chaos --part 2/3 --out runs/long/chaos-2 --jobs 2" in lines
    assert "pinned python -m tests.adversarial.fuzz --seconds 1800 --jobs 2" in lines
    assert "trl pytest -m  tests/engines/trl" in lines
    results = json.loads((clone / ".ci" / "long-results.json").read_text())
    assert {name: found["result"] for name, found in results.items()} == {
        "parity/tensor": "passed",
        "chaos/2": "failed with exit status 1",
        "fuzz/readers": "passed",
        "engines/trl": "passed",
    }
    assert {found["commit"] for found in results.values()} == {git(clone, "rev-parse", "HEAD").strip()}
    assert not any(found["dirty"] for found in results.values())
    listed = long("--status")
    assert listed.returncode == 1
    assert "chaos/2: failed" in listed.stdout
    assert "parity/tensor" not in listed.stdout
    assert long("fuzz").returncode == 0
    assert "pinned pytest" in long("fuzz/properties").stdout


def test_every_phase_is_a_function_of_the_script_and_every_engine_is_a_phase() -> None:
    script = (ROOT / ".ci" / "long").read_text()
    assert [name for name in long_phases.COVERS if f"\n{name}() {{" not in script] == []
    engines = {f"engines/{path.parent.name}" for path in (ROOT / "tests" / "engines").glob("*/requirements.txt")}
    assert engines == {name for name in long_phases.COVERS if name.startswith("engines/")}


def test_every_layout_and_every_fault_is_in_one_phase() -> None:
    script = (ROOT / ".ci" / "long").read_text()
    patterns = [re.findall(r"'([^']+)'", line) for line in script.splitlines() if line.startswith("parity/")]
    in_phases = [case.name for phase in patterns for case in select_cases(phase)]
    assert sorted(in_phases) == sorted(case.name for case in cases())
    parts = re.findall(r"^chaos/\d\(\) \{ chaos (\d/\d); }$", script, re.MULTILINE)
    faults = [fault for part in parts for fault in part_of_faults(list(FAULTS), part)]
    assert sorted(fault.name for fault in faults) == sorted(fault.name for fault in FAULTS)
    for wrong in ("0/3", "4/3", "2", "a/b"):
        with pytest.raises(UsageError, match="write I/N"):
            part_of_faults(list(FAULTS), wrong)


@pytest.mark.parametrize("name", long_phases.COVERS)
def test_every_covered_path_exists(name: str) -> None:
    assert [path for path in long_phases.COVERS[name] if not any(ROOT.glob(path.removeprefix(":(glob)")))] == []


CHAOS_PROGRAMS = ("tests.chaos.__main__", "tests.chaos.chaos_agent", "tests.chaos.chaos_rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "programs"), [("parity/tensor", ("zero2all.bench.parity",)), ("chaos/1", CHAOS_PROGRAMS)]
)
def test_a_phase_covers_what_its_programs_import(name: str, programs: tuple[str, ...]) -> None:
    graph = grimp.build_graph("zero2all", "tests")
    imported = {*programs}.union(*(graph.find_upstream_modules(program) for program in programs))
    files = {module.replace(".", "/") for module in imported if module != "zero2all"}
    paths = {path if path.startswith("tests/") else f"src/{path}" for path in files}
    covered = [path.removeprefix(":(glob)").removesuffix(".py") for path in long_phases.COVERS[name]]
    assert len(paths) > 50
    assert [
        path
        for path in sorted(paths)
        if not any(
            path == one or path.startswith(f"{one}/") or (path.count("/") == 2 and fnmatch(path, one))
            for one in covered
        )
    ] == []
