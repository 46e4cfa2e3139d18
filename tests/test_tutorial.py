"""The first hour: its commands run in order on a pseudo-terminal, as a person would type them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_pages import Page, Sandbox, foreign_lines, sandbox
from tests.interrupted import answers
from tests.test_doc_blocks import Blocks
from zero2all.storyworld import LANGUAGES, generate_stories

STORIES = 1500  # per language; the quickstart keeps a file of stories that exists
STEPS = 40
# A process of its own for each terminal: its stdin is the keyboard, its stdout the screen.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
CTRL_C = b"\x03"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def prepare(box: Sandbox) -> None:
    box.environment["TERM"] = "xterm-256color"
    directory = box.work / "runs" / "first" / "stories"
    directory.mkdir(parents=True)
    for language in LANGUAGES:
        lines = [json.dumps({"text": story}) + "\n" for story in generate_stories(language, 1, STORIES)]
        (directory / f"{language}.jsonl").write_text("".join(lines), encoding="utf-8")


PAGE = Page(
    "docs/learn/first-hour.md", prepare,
    {"--out runs/first": f"--out runs/first train.steps={STEPS} 'evals.every=20 steps' evals.stories=20",
     "train.steps=1000": f"train.steps={2 * STEPS}"},
)  # fmt: skip


def commands() -> list[str]:
    return [line for block in Blocks(PAGE).sources("sh") for line in block.splitlines()]


def test_what_is_run_in_another_size_is_on_the_page() -> None:
    assert all(printed in "\n".join(commands()) for printed in PAGE.changes)


def on_terminal(box: Sandbox, command: str) -> str:
    """Run a command to its end on a new pseudo-terminal; what it printed, without colours and cursor movements."""
    return ESCAPE.sub("", box.run(sys.executable, "-c", TERMINAL, *shlex.split(box.changed(command))))


def watch_on_terminal(box: Sandbox, command: str) -> str:
    """Start ``z2a watch``, open the page at the printed address, press Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, *shlex.split(command)],
        cwd=box.work, env=box.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    printed = process.stdout.readline().decode()
    address = re.search(r"http://[^\s\x1b]+", printed)
    assert address, printed + process.communicate(timeout=60)[0].decode()
    assert answers(address[0])
    printed += process.communicate(CTRL_C, timeout=60)[0].decode()
    assert process.returncode == 0, printed
    return ESCAPE.sub("", printed)


def check_quickstart(box: Sandbox, shown: str) -> None:
    assert "━" in shown, "no progress bar"
    assert f"step {STEPS}/{STEPS}  loss " in shown
    assert "what to do next:" in shown


def check_comparison(box: Sandbox, shown: str) -> None:
    assert re.search(r"^model\.num_hidden_layers +2 +3\s*$", shown, re.MULTILINE), shown
    measured = re.findall(r"^ *(\S+) +1 +(\d+\.\d{4}) ", shown, re.MULTILINE)
    assert [name for name, _ in measured] == ["first", "deeper"], shown


def check_extension(box: Sandbox, shown: str) -> None:
    assert f"resuming after step {STEPS}" in shown
    assert "lr 4.0e-03 │" in shown
    assert f"▒ trained, █ planned from step {STEPS}" in shown
    assert f"step {2 * STEPS}/{2 * STEPS}  loss " in shown


def check_generation(box: Sandbox, shown: str) -> None:
    assert shown.partition("One sunny morning, ")[2].strip(), shown


def check_stories(box: Sandbox, shown: str) -> None:
    assert re.search(r"stories: \d+ % of sentences parse, \d+ % of stories are consistent", shown), shown


def check_export(box: Sandbox, shown: str) -> None:
    exported = box.work / "runs" / "first" / "hf"
    assert json.loads((exported / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 2
    assert (exported / "model.safetensors").stat().st_size > 0


CHECKS = {
    "z2a quickstart": check_quickstart,
    "z2a compare": check_comparison,
    "--extend": check_extension,
    "--prompt": check_generation,
    "z2a eval stories": check_stories,
    "z2a export": check_export,
}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_commands_of_the_tutorial_run_in_order_on_a_terminal(tmp_path: Path) -> None:
    """What was printed is in ``transcript.txt``."""
    unchecked = set(CHECKS)
    with sandbox(PAGE, tmp_path, tmp_path) as box, (tmp_path / "transcript.txt").open("w", encoding="utf-8") as log:
        for command in commands():
            run = watch_on_terminal if command.startswith("z2a watch") else on_terminal
            shown = run(box, command)
            print("$", command, shown, sep="\n", file=log, flush=True)
            assert foreign_lines(shown) == []
            for name in [name for name in CHECKS if name in command]:
                CHECKS[name](box, shown)
                unchecked.remove(name)
    assert not unchecked
