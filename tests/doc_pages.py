"""A directory in which the commands of a documentation page run as printed, and what a test changes about them.

The shell functions stand in for what a test cannot do as a person would: press Ctrl-C in ``z2a watch``, start the same
line on a second node, answer at another machine. Everything else is the printed text.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from tests.evals.bench.fakes import write_benchmarks
from tests.processes import MARK, gone, marked
from tests.sshd import free_port, sshd, write_client

ROOT = Path(__file__).parents[1]
SECONDS = 1800
# What is printed and not run, with the reason. tests/test_doc_blocks.py counts them.
MARKED = {
    "vllm": "excludes our versions; tests/engines/vllm runs it in a venv of its own",
    "llama-completion": "needs the programs of llama.cpp; tests/export/test_gguf.py has it as a library",
    "ollama": "not installed by the tests",
    "sbatch": "needs a Slurm controller",
    "kubectl": "needs a Kubernetes cluster",
}
PRELUDE = r"""
set -euo pipefail
[ ! -f "$STATE" ] || . "$STATE"
interrupted() { "$PYTHON" "$INTERRUPTED" "$@"; }
z2a() {
  case " $* " in
    " watch "*" --once "* | " watch "*" --tty "*) command z2a "$@" ;;  # --tty ends with the run
    " watch "*) interrupted z2a "$@" ;;
    " launch "*" --rendezvous-only "*) command z2a "$@" >rendezvous.log 2>&1 & sleep 0 ;;
    " launch "*" --emit "*) command z2a "$@" ;;
    " launch "*" --rdzv-endpoint "*)
      command z2a "$@" >node.log 2>&1 & local node=$!
      command z2a "$@"
      wait $node || { cat node.log; return 1; } ;;
    *) command z2a "$@" ;;
  esac
}
tmux() { command tmux "$1" -d "${@:2}"; }
vllm() { test -f "$2/config.json"; }
llama-completion() { test -f "$2"; }
llama-cli() { test -f "$2"; }
llama-quantize() { test -f "$1"; }
ollama() { echo "not run: ollama"; }
sbatch() { bash -n "$1"; }
kubectl() {
  case "$1" in
    create) cat >/dev/null ;;
    *) "$PYTHON" -c 'import sys, yaml; list(yaml.safe_load_all(open(sys.argv[1])))' "${@: -1}" ;;
  esac
}
"""
# An installation into the venv of the tests would replace the checkout that is tested.
DRY_PIP = 'pip() { command pip "$1" --quiet --dry-run "${@:2}"; }\n'
# The index may be out of reach where a mirror is configured; the mirror then has the CPU build.
MIRRORED_PIP = """pip() {
  case " $* " in
    *" --index-url "*) command pip --quiet "$@" 2>/dev/null || command pip --quiet "$1" "$2" ;;
    *) command pip --quiet "$@" ;;
  esac
}
"""


@dataclass(frozen=True)
class Page:
    """A page with commands, and how a test prepares for it."""

    path: str
    prepare: Callable[[Sandbox], None]
    changes: dict[str, str] = field(default_factory=dict)
    """Printed text and what is run instead: sizes, host names, ports. ``{...}`` are values of the sandbox."""
    recipe: str = "my.yaml"
    """The file that commands call the recipe of this page."""
    in_clone: bool = False
    """Commands run in a copy of the repository, not in an empty directory."""
    own_venv: bool = False


# Lines of libraries: Python warnings, log lines of torch and absl, tqdm's bars, libraries that a wheel does not load.
FOREIGN_LINE = re.compile(
    r"^.*(?:\w+Warning: "
    r"|^\[?[WE]\d{4} \d\d:\d\d:|^USDT:|^\d{4}-\d\d-\d\d .*(?:WARNING|ERROR)|\d+(?:\.\d+)?(?:it/s|s/it)\b"
    r"|Failed to load .*\.so|Skipping import of cpp extensions).*$",
    re.MULTILINE,
)


def foreign_lines(printed: str) -> list[str]:
    """What libraries printed into the output of a command."""
    return [match[0] for match in FOREIGN_LINE.finditer(printed)]


class Sandbox:
    """A directory with its own home, where a page's blocks run one after another."""

    def __init__(self, root: Path, workspace: Path, page: Page) -> None:
        self.page, self.workspace = page, workspace
        self.home, self.work, self._mark = root / "home", root / "work", uuid.uuid4().hex
        self.home.mkdir(parents=True)
        if page.in_clone:
            copy_repository(self.work)
        else:
            self.work.mkdir()
        self.values = {"work": str(self.work), "port": str(free_port()), "other_port": str(free_port())}
        self._bin = root / "bin"
        self._bin.mkdir()
        tools = Path(sys.executable).parent
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "HOME": str(self.home),
            "PATH": f"{self._bin}:{tools}:{os.environ['PATH']}",
            "STATE": str(root / "state.sh"),
            "PYTHON": sys.executable,
            "INTERRUPTED": str(ROOT / "tests" / "interrupted.py"),
            "TMUX_TMPDIR": str(root),
            "COLUMNS": "120",
            MARK: self._mark,
        }
        if not page.own_venv:
            self.environment["PYTHONPATH"] = str((self.work if page.in_clone else ROOT) / "src")
        self._prelude = PRELUDE + (MIRRORED_PIP if page.own_venv else DRY_PIP)

    def changed(self, text: str) -> str:
        """Printed text with this page's changes."""
        for printed, run in self.page.changes.items():
            text = text.replace(printed, run.format(**self.values))
        return text

    def shell(self, text: str) -> str:
        """Run a block as printed, with this page's changes. Variables that it exports are kept for the next one."""
        script = f'{self._prelude}\ncd "$WORK"\n{self.changed(text)}\nexport -p >"$STATE"\n'
        return self.run("bash", "-c", script)

    def run(self, *command: str) -> str:
        finished = subprocess.run(
            command, cwd=self.work, env={**self.environment, "WORK": str(self.work)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS, text=True, errors="replace",
        )  # fmt: skip
        assert finished.returncode == 0, f"status {finished.returncode}:\n{finished.stdout[-4000:]}"
        assert foreign_lines(finished.stdout) == []
        return finished.stdout

    def z2a(self, *arguments: str) -> str:
        return self.run("z2a", *arguments)

    def write_recipe(self, text: str) -> None:
        """The recipe of the page, in the size of a test."""
        (self.work / self.page.recipe).write_text(self.changed(text), encoding="utf-8")

    def use_ssh_server(self, home: Path, port: int) -> None:
        """``cluster`` and ``login`` are this machine."""
        client = write_client(home, port, "host", "cluster login")
        program = self._bin / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
        program.chmod(0o755)
        self.values.update(user=getpass.getuser(), ssh_port=str(port))

    def close(self) -> None:
        for pid in marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        gone(self._mark)


@contextlib.contextmanager
def sandbox(page: Page, root: Path, workspace: Path) -> Iterator[Sandbox]:
    with contextlib.ExitStack() as stack:
        made = Sandbox(root, workspace, page)
        stack.callback(made.close)
        if any("{user}" in run for run in page.changes.values()):
            keys = root / "ssh"
            keys.mkdir()
            made.use_ssh_server(keys, stack.enter_context(sshd(keys)))
        page.prepare(made)
        yield made


def copy_repository(target: Path) -> None:
    """What git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout, to copy it")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def tiny_recipe(page: Sandbox) -> dict[str, Any]:
    """A recipe named ``mine`` over the small text of the tests; its stages are built already."""
    raw = page.workspace / "raw"
    return {
        "name": "mine",
        "out": "runs/mine",
        "corpus": {
            "sources": [
                {"name": "en", "paths": [f"{raw}/en.jsonl"]},
                {"name": "zh", "paths": [f"{raw}/zh"]},
                {"name": "code", "paths": [f"{raw}/code"]},
            ],
            "holdout": 0.1,
            "filters": [],
        },
        "tokenizer": {"vocab_size": 512, "min_frequency": 1},
        "model": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
        "train": {
            "tokens": 3072, "seq_len": 32, "batch_tokens": 256, "micro_batch_tokens": 128, "precision": "fp32",
            "optimizer": {"lr": 5e-3}, "schedule": {"warmup": "3 steps"},
        },
        "checkpoint": {"every": "4 steps"},
        "evals": {"tokens": 4096},
    }  # fmt: skip


def recipe_with(page: Sandbox, part: dict[str, Any]) -> dict[str, Any]:
    """A recipe of a common size with the sections of ``part``."""
    raw = page.workspace / "raw"
    sources = [{"name": "good", "paths": [f"{raw}/en.jsonl"]}, {"name": "code", "paths": [f"{raw}/code"]}]
    whole: dict[str, Any] = {
        "name": "part",
        "out": "runs/part",
        "corpus": {"sources": sources},
        "model": {"preset": "z2all-25m", "max_position_embeddings": 8192},
        "train": {} if "stages" in part.get("train", {}) else {"tokens": "10M"},
    }
    return {**whole, **{section: {**whole.get(section, {}), **keys} for section, keys in part.items()}}


def prepare_stages(page: Sandbox) -> None:
    """``my.yaml`` and its corpus, tokenizer and tokens."""
    (page.work / "my.yaml").write_text(yaml.safe_dump(tiny_recipe(page), sort_keys=False), encoding="utf-8")
    for name in ("documents", "tokenizer", "tokens"):
        shutil.copytree(page.workspace / name, page.work / "runs" / "mine" / name)


def prepare_run(page: Sandbox) -> None:
    """The same and a finished run."""
    prepare_stages(page)
    page.z2a("train", "my.yaml")


def prepare_benchmarks(page: Sandbox) -> None:
    """A finished run, a Hugging Face model and files of benchmarks."""
    prepare_run(page)
    page.z2a("export", "runs/mine", "--to", "models/Qwen3-0.6B")
    (page.work / "eval").mkdir()
    write_benchmarks(page.work / "eval")


def prepare_probes(page: Sandbox) -> None:
    """A short quickstart run, and its export."""
    page.z2a("quickstart", "--out", "runs/first", "train.steps=20")
    page.z2a("export", "runs/first", "--to", "Qwen3-0.6B")


def prepare_longer_run(page: Sandbox) -> None:
    prepare_stages(page)
    page.z2a("train", "my.yaml", "train.tokens=84Ki", "checkpoint.every=100 steps")


def prepare_pretrained(page: Sandbox) -> None:
    """Text, a finished run, and a Hugging Face model."""
    prepare_text(page)
    prepare_run(page)
    page.z2a("train", "my.yaml", "model.qk_norm=true", "model.tie_word_embeddings=true", "--name", "qwen3")
    page.z2a("export", "runs/mine/qwen3", "--to", "models/Qwen3-0.6B")


def prepare_text(page: Sandbox) -> None:
    """Real text in the shapes and places that the recipes of the pages name: Python's help and our Chinese pages."""
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    english = [prose[start : start + 40_000] for start in range(0, len(prose) - 40_000, 40_000)]
    third = len(english) // 3
    for directory in ("books", "notes", "articles", "data/books", "data/web", "data/en", "data/zh"):
        (page.work / directory).mkdir(parents=True)
    for number, text in enumerate(english):
        for directory in ("data/books", "books" if number < third else "notes"):
            (page.work / directory / f"{number}.txt").write_text(text, encoding="utf-8")
    for source in (ROOT / "docs").rglob("*.zh-CN.md"):
        shutil.copy(source, page.work / "data" / "zh")
    lines = ["".join(json.dumps({key: text}) + "\n" for text in english[third:]) for key in ("text", "body")]
    (page.work / "articles.jsonl").write_text(lines[0], encoding="utf-8")
    (page.work / "articles" / "part-0.jsonl").write_text(lines[1], encoding="utf-8")
    with pyarrow.CompressedOutputStream(page.work / "data" / "web" / "part-0.jsonl.zst", "zstd") as stream:
        stream.write(lines[0].encode())
    table = pyarrow.table({"article": english})
    pyarrow.parquet.write_table(table, page.work / "data" / "en" / "part-0.parquet")


def prepare_recipes(page: Sandbox) -> None:
    """The recipes of the repository in the size of a test, with text where they look for it."""
    prepare_text(page)
    (page.work / "my.yaml").write_text(yaml.safe_dump(tiny_recipe(page), sort_keys=False), encoding="utf-8")
    (page.work / "data" / "en" / "part-0.parquet").unlink()
    for source in (page.work / "data" / "books").iterdir():
        shutil.copy(source, page.work / "data" / "en")
    shutil.copytree(ROOT / "src" / "zero2all" / "recipe", page.work / "data" / "code")
    shutil.copytree(page.work / "data", page.work / "corpus")
    for name in ("85m.yaml", "reference/reference.yaml"):
        path = page.work / "recipes" / name
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        recipe["tokenizer"], recipe["model"] = {"vocab_size": 512}, tiny_recipe(page)["model"]
        recipe["train"].update(seq_len=64, batch_tokens=1024, micro_batch_tokens=256, precision="fp32", compile=False)
        if "stages" in recipe["train"]:
            for stage in recipe["train"]["stages"]:
                stage.update(steps=4, schedule={**stage["schedule"], "warmup": 0})
        else:
            recipe["train"].update(tokens=8192, schedule={"warmup": 1})
        path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
