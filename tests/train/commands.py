"""The command line in this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from zero2all.cli.main import app


def z2a(*words: object) -> str:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code, done.output
    message: str = json.loads(done.stdout)["error"]
    return message
