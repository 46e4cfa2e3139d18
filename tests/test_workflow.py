"""The workflow of the hosting site, as far as it can be checked without it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
WORKFLOW: dict[str, Any] = yaml.safe_load(TEXT)
STEPS = [(name, step) for name, job in WORKFLOW["jobs"].items() for step in job["steps"]]


def test_every_path_that_a_step_names_exists() -> None:
    named = {word for _, step in STEPS for word in re.findall(r"(?:\.ci|tests)/[\w./]+", step.get("run", ""))}
    assert named > {".ci/run", ".ci/long"}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_actions_are_pinned_by_commit_and_no_job_has_secrets_or_may_write() -> None:
    """A tag can be moved to other code; a commit cannot."""
    used = [step["uses"] for _, step in STEPS if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action)] == []
    assert len(re.findall(r"uses: \S+ # v\d+\.\d+\.\d+$", TEXT, re.MULTILINE)) == len(used), "say which version it is"
    assert "secrets" not in TEXT
    assert "${{ github.event.pull_request" not in TEXT, "a branch name or title in a shell line is code"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [name for name, job in WORKFLOW["jobs"].items() if "permissions" in job] == []
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts), "no token stays in .git/config"


def test_every_python_version_that_the_package_names_is_run_on_linux_and_macos() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [
        found[1]
        for name in project["classifiers"]
        if (found := re.fullmatch(r".*Python :: (\d\.\d+)", name)) is not None
    ]
    matrix = WORKFLOW["jobs"]["laptops"]["strategy"]["matrix"]
    assert matrix == {"os": ["ubuntu-latest", "macos-latest"], "python": versions}
    assert project["requires-python"] == f">={versions[0]}"


@pytest.mark.parametrize("name", WORKFLOW["jobs"])
def test_every_job_ends(name: str) -> None:
    assert WORKFLOW["jobs"][name]["timeout-minutes"] <= 360
