"""Passwords, keys and signatures in URLs stay usable, and are never shown or written."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.base.console import say, warn
from zero2all.base.errors import RecipeError, RecipeProblem, UsageError, Z2aError
from zero2all.base.paths import open_url, resolve_store, to_path
from zero2all.base.redact import redact
from zero2all.cli.main import app
from zero2all.corpus.readers.listing import list_files
from zero2all.recipe import SourceRecipe, load_recipe, parse_recipe, recipe_yaml
from zero2all.track.html_report import report_html
from zero2all.track.run_locations import LocalRunLocation
from zero2all.track.run_view import RunView

SECRET = "S3CRETPW"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bob:S3CRETPW@host/a", "http://bob:***@host/a"),
        ("http://bob:S3@CRETPW@host/a", "http://bob:***@host/a"),
        ("https://S3CRETPW@github.com/x", "https://***@github.com/x"),
        ("http://:S3CRETPW@host", "http://:***@host"),
        ("s3://KEY:S3CRETPW@bucket/a", "s3://KEY:***@bucket/a"),
        ("s3://KEY:S3C/RET+PW=@bucket/a", "s3://KEY:***@bucket/a"),
        ("s3://KEY:12/S3CRETPW@bucket/a", "s3://KEY:***@bucket/a"),
        ("'http://bob:S3CRETPW@a', 'ftp://eve:S3CRETPW@b/c'", "'http://bob:***@a', 'ftp://eve:***@b/c'"),
        ('{"a":"http://bob:S3CRETPW@a","b":"http://b:S3CRETPW@c"}', '{"a":"http://bob:***@a","b":"http://b:***@c"}'),
        ("http://bob:S3CRETPW@[::1]:80/a", "http://bob:***@[::1]:80/a"),
        ("http://h/a?X-Amz-Signature=S3CRETPW&x=1", "http://h/a?X-Amz-Signature=***&x=1"),
        ("http://h/a?x=1&X-Amz-Credential=S3CRETPW#f", "http://h/a?x=1&X-Amz-Credential=***#f"),
        ("http://h/a?X-Amz-Security-Token=S3CRETPW", "http://h/a?X-Amz-Security-Token=***"),
        ("http://h/a?sig=S3CRETPW%3D", "http://h/a?sig=***"),
        ("http://h/a?token=S3CRETPW&access_token=S3CRETPW", "http://h/a?token=***&access_token=***"),
        ("http://h/a?api_key=S3CRETPW, then", "http://h/a?api_key=***, then"),
        ("http://h/a?Password=S3CRETPW", "http://h/a?Password=***"),
    ],
)
def test_what_is_secret_in_a_url(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(redact(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8080/?key=abc",  # the page of 'z2a watch', which is printed to be used
        "ssh://me@host:22/runs/a@b",
        "http://host:8080/a@b/c?tokens=5&step=1",
        "s3://bucket/a:b/c@d",
        "http://[::1]:80/a@b",
        "see me@host: it is 12:30",
        "git@github.com:a/b.git",
    ],
)
def test_what_is_not_secret(text: str) -> None:
    assert redact(text) == text


def test_messages_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://bob:{SECRET}@host/x"
    for error in (Z2aError(f"no {url}"), UsageError(f"no {url}"), RecipeError(url, [RecipeProblem("a", url, url)])):
        assert SECRET not in str(error)
        assert SECRET not in repr(error)
    assert SECRET not in str(RecipeError("x", [RecipeProblem("a", url, url)]).problems)
    say(f"reading {url}")
    warn(f"reading {url}")
    assert "bob:***@host" in (shown := capsys.readouterr().err)
    assert SECRET not in shown


def test_a_secret_that_is_cut_off_in_the_message_about_an_override_is_redacted() -> None:
    url = f"http://bob:{SECRET}{'x' * 80}@host/a"
    with pytest.raises(RecipeError) as caught:
        parse_recipe("train: {steps: 1}", [f"corpus.sources={url}", f"name={url}"])
    assert len(caught.value.problems) == 2
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.problems)


def test_a_recipe_is_shown_and_written_without_secrets_and_loads_again(tmp_path: Path) -> None:
    url = f"http://bob:{SECRET}@host/a.jsonl"
    signed = f"https://host/b?X-Amz-Signature={SECRET}"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        json.dumps(
            {"train": {"steps": 1}, "corpus": {"sources": [{"name": "a", "paths": [url]}], "decontaminate": [signed]}}
        )
    )
    recipe = load_recipe(path)
    assert recipe.corpus.sources[0].paths == [url], "still usable"
    assert recipe.corpus.decontaminate == [signed]
    written = recipe_yaml(recipe)
    assert SECRET not in written
    assert parse_recipe(written).corpus.sources[0].paths == ["http://bob:***@host/a.jsonl"]
    for words in (["show"], ["show", "--json"], ["check", "seed=x"], ["check", "--json", "seed=x"]):
        done = CliRunner().invoke(app, ["recipe", words[0], str(path), *words[1:]])
        assert SECRET not in done.output


@pytest.mark.parametrize("field", ["corpus.dir", "checkpoint.dir", "source", "corpus.decontaminate"])
@pytest.mark.parametrize("url", [f"s3://KEY:{SECRET}@bucket/a", f"s3://KEY:a/{SECRET}@bucket/a"])
def test_store_credentials_belong_into_the_environment(tmp_path: Path, field: str, url: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("train: {steps: 1}")
    value = {"source": f"corpus.sources=[{{name: a, paths: ['{url}']}}]", "corpus.decontaminate": f"{field}=['{url}']"}
    done = CliRunner().invoke(app, ["recipe", "check", str(path), value.get(field, f"{field}={url}")])
    assert done.exit_code == 2
    assert "AWS_SECRET_ACCESS_KEY" in done.output
    assert SECRET not in done.output
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY"):
        resolve_store(url)
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY"):
        to_path(url).exists()


def test_a_redacted_url_explains_where_its_secret_went() -> None:
    with pytest.raises(UsageError, match="redacted"):
        resolve_store("http://bob:***@host/a")
    with pytest.raises(UsageError, match="redacted"):
        resolve_store("http://host/a?sig=***")


def test_page_and_report_of_an_older_run_show_no_secret(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text('{"step":0,"loss":1}\n')
    (tmp_path / "recipe.yaml").write_text(f"corpus: {{sources: [{{name: a, paths: ['http://b:{SECRET}@h/x']}}]}}\n")
    (tmp_path / "environment.json").write_text(json.dumps({"git": {"remote": f"https://b:{SECRET}@h/x"}}))
    run = RunView(LocalRunLocation(tmp_path))
    run.refresh()
    assert run.metadata.environment == {"git": {"remote": "https://b:***@h/x"}}
    assert SECRET not in run.metadata.recipe
    assert SECRET not in report_html([run])


class Guarded(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Basic " + base64.b64encode(f"bob:{SECRET}".encode()).decode()
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", "5" if right else "0")
        self.end_headers()
        if right and self.command == "GET":
            self.wfile.write(b"hello")

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def guarded() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_password_in_a_url_still_opens_the_file_and_is_not_in_the_error_without_one(guarded: str) -> None:
    with open_url(f"http://bob:{SECRET}@{guarded}/a.txt") as stream:
        assert stream.read() == b"hello"
    wrong = SourceRecipe(name="a", paths=[f"http://eve:{SECRET}@{guarded}/a.txt"])
    with pytest.raises(Z2aError, match=r"eve:\*\*\*@") as caught:
        list_files(wrong)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "Z2A_JOB_SECRET", "Z2A_API_KEY", "DB_PASSWORD"]
)
def test_a_secret_of_the_environment_is_never_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries put what they were given into their errors."""
    monkeypatch.setenv(name, SECRET)
    say(f"connecting with {SECRET}")
    warn(f"refused: {SECRET}!")
    assert SECRET not in str(Z2aError(f"401 for {SECRET}"))
    assert SECRET not in capsys.readouterr().err
    monkeypatch.setenv(name, "a")
    assert redact("a text") == "a text", "a value of one letter is in every text"


@pytest.mark.parametrize("name", ["HOME_DIRECTORY", "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "AWS_ACCESS_KEY_ID"])
def test_other_variables_are_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "an ordinary value")
    assert redact("an ordinary value") == "an ordinary value"


def test_a_failure_report_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero2all.cluster.launch.exit_reason import read_error_file

    monkeypatch.setenv("HF_TOKEN", SECRET)
    trace = f"Traceback\n  get('http://bob:{SECRET}x@host')\nHTTPError: {SECRET} is refused"
    (tmp_path / "error.json").write_text(
        json.dumps({"message": {"message": f"401: {SECRET}", "extraInfo": {"py_callstack": trace}}})
    )
    message, shown, when = read_error_file(tmp_path / "error.json")
    assert SECRET not in message + shown
    assert "is refused" in shown
    assert when > 0
