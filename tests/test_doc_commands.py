"""Commands of every page: their options exist, fast ones run, and the printed output is what they print.

Commands that take longer run in .ci/long (tests/test_doc_blocks.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tests.test_docs import PAGES, ROOT
from tests.test_reference import schema_keys
from zero2all.cli.main import app

WRITTEN = [page for page in PAGES if page != "CHANGELOG.md" and "reference/" not in page]
EXECUTED = ("README.md", "docs/start/your-text.md", "recipes/README.md")
FAST = ("--version", "recipe check", "recipe show", "recipe schema", "plan")
SHELL_OPERATORS = set("();<>|&\n")
SMALL_RECIPE = "name: small\nout: runs/small\ncorpus: {sources: [{name: notes, paths: [notes]}]}\n"


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def shell_commands(text: str) -> Iterator[list[str]]:
    """The words after ``z2a`` of each of its commands in a script, also of those that ``z2a launch`` starts."""
    text = re.sub(r"(?:^|\s)#.*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(SHELL_OPERATORS))
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= SHELL_OPERATORS:
            yield from z2a_commands(words)
            words = []
        else:
            words.append(word)


def z2a_commands(words: list[str]) -> Iterator[list[str]]:
    if "z2a" not in words:
        return
    words = words[words.index("z2a") + 1 :]
    yield words
    if words[:1] == ["launch"] and "--" in words:
        started = words[words.index("--") + 1 :]
        if started[0] != "python":
            yield started


@cache
def page_commands(page: str) -> list[list[str]]:
    return [words for text in blocks(page, "sh") for words in shell_commands(text)]


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and its arguments."""
    command: Any = root_command()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def mistake(words: list[str]) -> str | None:
    """What is wrong with a command line."""
    command, arguments = find_command(words)
    if hasattr(command, "commands") and not arguments[0].startswith("-"):
        return f"no such command: {arguments[0]}"
    try:
        context = command.make_context("z2a", list(arguments))
    except typer.Exit:  # --help, --version
        return None
    except Exception as error:  # typer has its own copy of click's exceptions
        if not hasattr(error, "format_message"):
            raise
        message = str(error.format_message())
        return None if message.endswith("does not exist.") else message  # a file of the reader
    overrides = context.params.get("overrides") or []
    unknown = [one for one in overrides if one.split("=")[0] not in recipe_keys()]
    return f"no such key: {unknown}" if unknown else None


@cache
def recipe_keys() -> set[str]:
    return {key for key, _ in schema_keys()}


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_have_options_that_exist(page: str) -> None:
    wrong = {" ".join(words): found for words in page_commands(page) if (found := mistake(words))}
    assert wrong == {}


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_in_sentences_have_options_that_exist(page: str) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for span in re.findall(r"`z2a ([^`]+)`", prose):
        command, rest = find_command(span.split(" -- ")[0].split())
        wrong += [f"z2a {span}"] if hasattr(command, "commands") and rest and rest[0][0].islower() else []
        known = {flag for one in command.params for flag in [*one.opts, *one.secondary_opts]} | {"--help", "--json"}
        wrong += [
            f"z2a {span}" for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span.split(" -- ")[0]) if flag not in known
        ]
    assert wrong == []


def test_a_mistake_in_a_command_is_found() -> None:
    assert mistake(["train", "my.yaml", "train.steps=5", "--name", "a"]) is None
    assert "--nam" in str(mistake(["train", "my.yaml", "--nam", "a"]))
    assert "train.stpes" in str(mistake(["train", "my.yaml", "train.stpes=5"]))
    assert mistake(["plan"]) is not None
    assert mistake(["tarin", "my.yaml"]) is not None
    script = (
        "OMP_NUM_THREADS=1 z2a train a.yaml > log  # b\nz2a launch --procs 2 -- train a.yaml && z2a \\\n  export x\n"
    )
    assert [words[0] for words in shell_commands(script)] == ["train", "launch", "train", "export"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with our recipes."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_inputs(page: str, place: Path) -> None:
    """The recipes that commands of a page name and their text: as printed on the page, or a small one."""
    printed = [text for text in blocks(page, "yaml") if text.startswith("name:")]
    named = {word for words in page_commands(page) for word in words if word.endswith(".yaml")}
    for name in named:
        path = place / name
        if not path.exists() and "/" not in name:
            path.write_text(printed[0] if printed else SMALL_RECIPE, encoding="utf-8")
        recipe = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
        sources = recipe.get("corpus", {}).get("sources", [])
        for text in (text for source in sources for text in source["paths"]):
            file = Path(text.replace("**", "a").replace("*", "a"))
            file = file if file.suffix else file / "a.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


@pytest.mark.parametrize("page", EXECUTED)
def test_fast_commands_run(page: str, place: Path) -> None:
    write_inputs(page, place)
    commands = [words for words in page_commands(page) if " ".join(words).startswith(FAST)]
    assert commands, "no command of this page runs in the gate"
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"z2a {' '.join(words)}:\n{done.output}"


def printed_outputs() -> dict[str, list[tuple[str, str]]]:
    """Each command whose output is printed on a page, with the pages and what they print."""
    found: dict[str, list[tuple[str, str]]] = {}
    for page in PAGES:
        for text in blocks(page, ""):
            if text.startswith("$ z2a "):
                command, _, output = text.removeprefix("$ z2a ").partition("\n")
                found.setdefault(command, []).append((page, output))
    return found


@pytest.mark.parametrize("command", printed_outputs())
def test_printed_output_is_what_the_command_prints(command: str, place: Path) -> None:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    for page, printed in printed_outputs()[command]:
        pattern = "".join(
            r"(?:.*\n)*" if line.strip() == "…" else re.escape(line.rstrip()) + r" *\n" for line in printed.splitlines()
        )
        assert re.fullmatch(pattern, done.stdout), f"{page}: z2a {command} prints\n{done.stdout}"
