"""Recipes that are made to do harm, or that read as something else than they look like: exit 2, with a position."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero2all.base.errors import UsageError
from zero2all.base.units import Duration, parse_count
from zero2all.cli.main import app
from zero2all.recipe import parse_recipe
from zero2all.recipe.safe_yaml import read_yaml

LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 30)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}\n" for level in range(1, 30)
)
HOSTILE: dict[str, tuple[str, str]] = {
    "billion laughs": (LAUGHS, "line 6, .*more than 50000 values"),
    "billion laughs by merges": (MERGES, "line 6, .*more than 50000 values"),
    "alias in itself": ("train: &t\n  steps: 1\n  stages: [*t]", "contains itself"),
    "list in itself": ("&a [*a]", "contains itself"),
    "deep lists": ("a: " + "[" * 5000 + "]" * 5000, "line 1, column 67: nested more than 64 levels"),
    "deep lists without end": ("[" * 1_000_000, "nested more than 64 levels"),
    "deep mappings": ("".join(" " * level + f"k{level}:\n" for level in range(1000)), "nested more than 64 levels"),
    "deep flow mappings": ("{a: " * 5000, "nested more than 64 levels"),
    "5000 digits": ("train: {steps: 1}\nseed: " + "7" * 5000, "line 2, column 7: a number of 5000 digits"),
    "5000 digits as text": ("seed: '" + "7" * 5000 + "'", "seed"),
    "a count of 5000 digits": ("train: {steps: '" + "7" * 5000 + "'}", "line 1, train.steps: .*too large"),
    "an exponent": ("train: {steps: 1e999999999}", "line 1, train.steps: .*too large"),
    "an exponent with a unit": ("train: {steps: 1, schedule: {warmup: 1e999999 tokens}}", "too large|not a duration"),
    "an exponent beyond decimals": ("train: {steps: 1e99999999999999999999}", "train.steps"),
    "duplicate keys": ("seed: 1\ntrain: {steps: 1}\nseed: 2", "line 3, column 1: the key 'seed' is already in line 1"),
    "duplicate keys inside": (
        "train:\n  steps: 1\n  steps: 2",
        "line 3, column 3: the key 'steps' is already in line 2",
    ),
    "a key that is a list": ("? [a]\n: 1", "line 1, column 3: a key must be a word"),
    "a key that is a mapping": ("{{a: 1}: 2}", "a key must be a word"),
    "a python tag": ("seed: !!python/object/apply:os.system [true]", "line 1, column 7: the tag"),
    "a binary tag": ("seed: !!binary aGVsbG8=", "the tag"),
    "a timestamp tag": ("seed: !!timestamp x", "the tag"),
    "a set": ("seed: !!set {a}", "the tag"),
    "not an integer": ("seed: !!int abc", "line 1, column 7: 'abc' is not an integer"),
    "not a float": ("seed: !!float abc", "is not a number"),
    "not a bool": ("seed: !!bool abc", "neither true nor false"),
    "sexagesimal": ("train: {steps: 1}\nseed: 1_0:2:3:4", "line 2, seed: .*1_0:2:3:4"),
    "sexagesimal time": ("train: {steps: 12:30:45}", "line 1, train.steps: .*12:30:45"),
    "sexagesimal float": ("train: {steps: 1, optimizer: {lr: 1:30.5}}", "1:30.5"),
    "octal as in C": ("seed: 0o17", "line 1, seed"),
    "binary": ("seed: 0b11", "line 1, seed"),
    "true for an integer": ("seed: true", "line 1, seed: must be a number"),
    "true for a count": ("train: {steps: true}", "line 1, train.steps: .*number"),
    "true for a float": ("train: {steps: 1, optimizer: {lr: true}}", "train.optimizer.lr: must be a number"),
    "true in a list": ("train: {steps: 1, optimizer: {betas: [true, false]}}", "betas.*must be a number"),
    "true as a weight": ("{train: {steps: 1, mixture: {a: true}}}", "mixture.*must be a number"),
    "true for a size": ("parallel: {tp: true}", "parallel.tp: must be a number"),
    "infinity": ("train: {steps: 1, optimizer: {lr: .inf}}", "train.optimizer.lr.*finite"),
    "infinity by digits": ("train: {steps: 1, optimizer: {lr: 1e400}}", "train.optimizer.lr.*finite"),
    "not a number": ("train: {steps: 1, optimizer: {lr: .nan}}", "train.optimizer.lr.*finite"),
    "an integer beyond 64 bits": ("track: {log_every: 99999999999999999999}", "track.log_every.*too large"),
    "two documents": ("seed: 1\n---\nseed: 2", "line 2"),
    "a control character": ("seed: 1\x00", "is not plain YAML"),
    "an open bracket": ("seed: [1", "line 1"),
    "a tab": ("seed:\n\t- 1", "line 2"),
    "an unknown alias": ("seed: *x", "line 1, column 7"),
    "too large": ("# " + "x" * 2**21, "larger than 1 MiB"),
    "number keys": ("1: 2", "recipe|1"),
    "null key": ("~: 2", "mistake|recipe"),
    "a long value": ("seed: " + "x" * 100_000, "line 1, seed"),
    "a list": ("- 1", "must be a mapping"),
}


def refused(status: int, output: str) -> str:
    assert status == 2, output
    assert "this is a bug" not in output
    assert len(output) < 3000, "an error that fills the screen"
    return output


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_recipe_is_refused_with_its_position(tmp_path: Path, what: str) -> None:
    text, message = HOSTILE[what]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        parse_recipe(text, origin=str(path))
    assert str(path) in str(caught.value)
    done = CliRunner().invoke(app, ["recipe", "check", str(path)])
    refused(done.exit_code, done.output)


@pytest.mark.parametrize(
    "override",
    [
        "seed=" + "7" * 5000,
        "seed=true",
        "seed=1_0:2:3:4",
        "seed=" + "[" * 5000,
        "seed=&a [*a]",
        "seed={a: 1, a: 2}",
        "seed=!!python/object/apply:os.system [true]",
        "train.steps=1e999999999",
        ".".join(["a"] * 5000) + "=1",
        "seed.x=1",
        "corpus.sources.0.name=x",
        "train.optimizer.lr=.inf",
        "model.num_hidden_layers=yes",
        "seed=" + "x" * 2**21,
    ],
)
def test_a_hostile_override_is_refused(override: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("train: {steps: 1}")
    done = CliRunner().invoke(app, ["recipe", "check", str(path), override])
    refused(done.exit_code, done.output)


def test_what_looks_like_text_is_text_and_what_looks_like_a_number_is_that_number() -> None:
    text = "[no, yes, on, off, y, n, 12:30:45, 2024-01-01, 012, 0b11, 0o7, =, <<x]"
    assert read_yaml(text, "x")[0] == [word.strip() for word in text[1:-1].split(",")]
    numbers, _ = read_yaml("[0, -7, 1_000, 0x1F, 1.5, .5, 1.0e-3, 1.5e3, .inf, true, false, null, ~, '']", "x")
    assert numbers == [0, -7, 1000, 31, 1.5, 0.5, 0.001, 1500.0, float("inf"), True, False, None, None, ""]
    assert parse_recipe("{name: no, train: {steps: 1, compile: yes}}").name == "no"
    assert parse_recipe("{train: {steps: 1, compile: yes}}").train.compile is True
    assert parse_recipe("{seed: 012, train: {steps: 1e3}}").seed == 12


def test_an_alias_may_be_used_and_an_override_changes_one_place_only() -> None:
    text = """
    corpus:
      sources:
        - &a {name: a, paths: [x]}
        - {<<: *a, name: b}
    train: {stages: [{name: s, steps: 1, schedule: &s {warmup: 5}}, {name: t, steps: 1, schedule: *s}]}
    """
    recipe = parse_recipe(text)
    assert [(source.name, source.paths) for source in recipe.corpus.sources] == [("a", ["x"]), ("b", ["x"])]
    shared = "model: &m {num_hidden_layers: 2}\nevals: *m"
    values, _ = read_yaml(shared, "x")
    assert values["model"] is not values["evals"]


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    fifo = tmp_path / "recipe.yaml"  # as from a shell: z2a recipe check <(...)
    os.mkfifo(fifo)
    written: list[int] = []

    def write() -> None:
        try:
            with open(fifo, "wb", buffering=0) as stream:
                while True:
                    written.append(stream.write(b"#" * 65536))
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    done = CliRunner().invoke(app, ["recipe", "check", str(fifo)])
    assert "larger than 1 MiB" in refused(done.exit_code, done.output)
    writer.join(60)
    assert sum(written) < 4 * 2**20


@pytest.mark.parametrize("text", ["1e400", "9" * 5000, "1e99999999999999999999", str(2**63)])
def test_a_count_that_no_machine_reaches_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        parse_count(text)
    with pytest.raises(ValueError, match="duration"):
        Duration.parse(f"{text} tokens")
