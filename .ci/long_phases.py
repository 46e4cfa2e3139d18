"""The phases of .ci/long: names, the paths that each covers, and the results of their last runs.

    long_phases.py select [NAME...]                       the phases of these names or groups, or all
    long_phases.py state                                  the commit that is checked out, "+" after it if files changed
    long_phases.py record PHASE STATE SECONDS STATUS      write a result to long-results.json
    long_phases.py status                                 what must run before a release; fails if anything must

Only the standard library: it runs before there is a venv.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ".ci/long-results.json"
SRC = "src/zero2all/"


def _packages(*names: str) -> tuple[str, ...]:
    """Packages, with what all of them import, and the versions of dependencies."""
    return ("src/zero2all/__init__.py", f"{SRC}base", "pyproject.toml", *(SRC + name for name in names))


# git pathspecs. tests/test_long_phases.py compares the first two with what their programs import.
PARITY = _packages("bench", "model", "optim", "parallel", "recipe", "train")
CHAOS = (
    "tests/chaos",
    *_packages("checkpoint", "cluster", "corpus", "generation", "model", "optim", "parallel", "planner", "recipe"),
    *_packages("storyworld", "tokenizer", "tokens", "track", "train"),
)
COVERS: dict[str, tuple[str, ...]] = {
    **{f"parity/{name}": PARITY for name in ("replicated", "sharded", "tensor", "pipeline", "context", "experts")},
    **{f"chaos/{part}": CHAOS for part in (1, 2, 3)},
    "long": ("src", "tests", "recipes", "benchmarks", "examples", "docs", "web", "pyproject.toml"),
    "attack": ("src", "tests/adversarial", "pyproject.toml"),
    "fuzz/properties": ("src", "tests", "pyproject.toml"),
    "fuzz/readers": ("src", "tests/adversarial", "pyproject.toml"),
    "torch": _packages(
        "model", "optim", "train", "parallel", "checkpoint", "cluster", "evals", "generation", "recipe", "tokens"
    ),
    "engines/cuda": (*_packages("model", "optim", "parallel", "recipe", "train"), "tests/engines/cuda"),
    "engines/lm_eval": (*_packages("evals", "generation", "model", "tokenizer"), "tests/engines/lm_eval"),
    "engines/trl": (
        *_packages("generation", "model", "recipe", "tokenizer", "tokens", "train"),
        "tests/engines/trl",
        "tests/oracle",
    ),
    "engines/vllm": (*_packages("export", "model", "recipe", "tokenizer"), "tests/engines/vllm"),
}


def select(words: Sequence[str]) -> list[str]:
    """Phases by name or by group: fuzz is fuzz/properties and fuzz/readers."""
    for word in words:
        if not any(word in (name, name.partition("/")[0]) for name in COVERS):
            raise SystemExit(f"no phase {word!r}; there are {' '.join(COVERS)}")
    return [name for name in COVERS if not words or {name, name.partition("/")[0]} & set(words)]


def _git(root: Path, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", *words]  # the user of sudo does not own the clone
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def state(root: Path) -> str:
    """The commit that is checked out, with a plus if any other file is there or differs."""
    try:
        changed = _git(root, "status", "--porcelain", "--", ":/", f":(exclude,top){RESULTS}")
        return _git(root, "rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown+"  # no clone


def record(root: Path, name: str, before: str, seconds: int, exit_status: int) -> None:
    """The state before the run counts, and it counts as changed unless it is still the same."""
    select([name])
    results = read_results(root)
    results[name] = {
        "commit": before.rstrip("+"),
        "dirty": before.endswith("+") or before != state(root),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "result": "passed" if exit_status == 0 else f"failed with exit status {exit_status}",
    }
    ordered = {phase: results[phase] for phase in COVERS if phase in results}
    written = root / f"{RESULTS}.tmp"
    written.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
    os.replace(written, root / RESULTS)


def read_results(root: Path) -> dict[str, dict[str, Any]]:
    path = root / RESULTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def must_run(root: Path) -> Iterator[str]:
    """A line for each phase without a green run of what is checked out now, with the reason."""
    results = read_results(root)
    for name, paths in COVERS.items():
        reason = _why(root, results[name], paths) if name in results else "never ran"
        if reason is not None:
            yield f"{name}: {reason}"


def _why(root: Path, last: dict[str, Any], paths: Sequence[str]) -> str | None:
    at = f"at {last['commit'][:12]}, {last['date']}"
    if last["result"] != "passed":
        return f"{last['result']} {at}"
    if last["dirty"]:
        return f"passed {at}, with changes that were not committed"
    try:
        changed = _git(root, "diff", "--name-only", last["commit"], "HEAD", "--", *paths).splitlines()
    except subprocess.CalledProcessError:
        return f"passed {at}, a commit that is not in this clone"
    if changed:
        return f"passed {at}; changed since: {', '.join(changed[:3])}" + (
            f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        )
    return None


def main(words: Sequence[str], root: Path = ROOT) -> int:
    match words:
        case ["select", *names]:
            print("\n".join(select(names)))
        case ["state"]:
            print(state(root))
        case ["record", name, before, seconds, exit_status]:
            record(root, name, before, int(seconds), int(exit_status))
        case ["status"]:
            lines = list(must_run(root))
            print("\n".join(lines) if lines else f"all {len(COVERS)} phases passed, and nothing they cover has changed")
            return 1 if lines else 0
        case _:
            raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
