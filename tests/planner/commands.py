"""``z2a plan`` in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from zero2all.cli.main import app


def plan_text(*words: object) -> str:
    done = CliRunner().invoke(app, ["plan", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def plan_json(*words: object) -> Any:
    return json.loads(plan_text(*words, "--json"))
