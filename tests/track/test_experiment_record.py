"""Experiments as the page gets them: from files that anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from tests.experiments.helpers import experiment, variant
from tests.track.runs import record_steps
from zero2all.base.io import write_record
from zero2all.track.experiment_record import MAX_FILE_BYTES, find_experiments
from zero2all.track.html_report import report_html
from zero2all.track.run_locations import LocalRunLocation, SshRunLocation
from zero2all.track.run_view import RunView
from zero2all.track.server import build_app
from zero2all.track.ssh import SshConnection, UnreachableError

KEY = "the-key"
RECORD = experiment("compare", variant("a", 1, 2.0), variant("b", 1, 1.9))


@pytest.fixture
def runs(tmp_path: Path) -> list[RunView]:
    """Two runs of an experiment and one of none."""
    directory = tmp_path / "out" / "experiments" / "ab"
    places = [directory / "a-seed1", directory / "b-seed1", tmp_path / "out" / "run"]
    for place in places:
        record_steps(place)
    write_record(directory / "experiment.json", RECORD)
    return [RunView(LocalRunLocation(place)) for place in places]


def shown(runs: list[RunView]) -> list[dict[str, Any]]:
    with TestClient(build_app(runs, KEY)) as client:
        assert client.get("/api/experiments").status_code == 403
        answer: list[dict[str, Any]] = client.get("/api/experiments", params={"key": KEY}).json()
        return answer


def experiment_file(runs: list[RunView]) -> Path:
    location = runs[0].location
    assert isinstance(location, LocalRunLocation)
    return location.directory.parent / "experiment.json"


def test_the_page_gets_the_record_and_the_numbers_of_the_runs(runs: list[RunView]) -> None:
    [found] = shown(runs)
    assert (found["name"], found["runs"], found["trouble"]) == ("ab", {"a-seed1": 0, "b-seed1": 1}, "")
    assert [one["bits_per_byte"] for one in found["record"]["groups"]] == [2.0, 1.9]
    [verdict] = found["record"]["verdicts"]
    assert (verdict["reference"], verdict["other"], verdict["margin"]) == ("a", "b", None)
    assert verdict["difference"] == pytest.approx(-0.1)
    assert '"experiments": [{"name": "ab"' in report_html(runs)


def test_secrets_and_control_characters_do_not_reach_the_page(runs: list[RunView]) -> None:
    value = json.loads(experiment_file(runs).read_text())
    value["variants"][0].update(overrides=["corpus.dir=https://me:password@host/x"], reason="\x1b[2Jgone\u202e")
    experiment_file(runs).write_text(json.dumps(value))
    [found] = shown(runs)
    first = found["record"]["variants"][0]
    assert "password" not in json.dumps(found)
    assert first["reason"] == "\\x1b[2Jgone\\u202e"


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (b"{", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b" " * (MAX_FILE_BYTES + 1), "is larger than"),
        (b'{"format": 7}', "format"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_in_one_line(runs: list[RunView], content: bytes, trouble: str) -> None:
    experiment_file(runs).write_bytes(content)
    [found] = shown(runs)
    assert found["record"] is None
    assert trouble in found["trouble"]
    assert len(found["trouble"]) < 400


def test_a_link_is_not_followed(runs: list[RunView], tmp_path: Path) -> None:
    experiment_file(runs).rename(tmp_path / "elsewhere.json")
    experiment_file(runs).symlink_to(tmp_path / "elsewhere.json")
    assert shown(runs) == []


class Remote:
    """An ssh connection to a machine with one file."""

    host = "cluster"

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def file_sizes(self, directory: str, patterns: list[str]) -> dict[str, int]:
        return {
            name: len(self.files[f"{directory}/{name}"]) for name in patterns if f"{directory}/{name}" in self.files
        }

    def read(self, path: str, start: int, length: int) -> bytes:
        return self.files[path][start : start + length]


def remote(files: dict[str, bytes], *directories: str) -> list[SshRunLocation]:
    connection = cast(SshConnection, Remote(files))
    return [SshRunLocation(connection, directory) for directory in directories]


def test_an_experiment_on_another_machine(runs: list[RunView]) -> None:
    files = {"/out/experiments/ab/experiment.json": experiment_file(runs).read_bytes()}
    found = find_experiments(remote(files, "/out/experiments/ab/b-seed1", "/out/run"))
    assert [(one.name, one.runs) for one in found] == [("ab", {"b-seed1": 0})]
    assert found[0].record["groups"][0]["group"] == "a"


def test_a_machine_that_does_not_answer_hides_no_other_experiment(runs: list[RunView]) -> None:
    class Unreachable(Remote):
        def file_sizes(self, directory: str, patterns: list[str]) -> dict[str, int]:
            raise UnreachableError("no route to host")

    location = SshRunLocation(cast(SshConnection, Unreachable({})), "/x/y/run")
    assert [(one.name, one.trouble) for one in find_experiments([location, runs[0].location])] == [("ab", "")]
