"""The generated pages in docs/reference are current and complete.

What must be in them comes from the JSON schema, the parsed command tree and the text of ``__all__``, not from the
generator.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import zero2all
from generate_reference import REFERENCE, generated
from reference_generator.fragments import FRAGMENTS, same_names
from reference_generator.key_tests import VALUE_PATHS, key_tests, keys_set_in
from zero2all.cli.main import app
from zero2all.recipe import PRESETS, recipe_schema

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "", "recipe", "corpus", "tokenizer", "tokens", "model", "parallel", "train", "checkpoint", "cluster.launch",
    "cluster.doctor", "track", "evals", "generation", "storyworld",
)  # fmt: skip
MAX_UNTESTED_KEYS = 12
TYPER_FLAGS = {"--install-completion", "--show-completion"}
LAYER_TABLE = re.findall(
    r"<!-- generated: layers -->(.*?)<!-- end -->",
    (ROOT / "docs" / "contribute" / "architecture.md").read_text("utf-8").replace("| 9 |", "| 7 |"),
    flags=re.DOTALL,
)
# A sentence or a noun phrase that stands alone, not one that continues the name or the key above.
SENTENCE = re.compile(r"(?!(Of|As|Those|Such|Default|Written) )[A-Z].* .*\.", re.DOTALL)
# After the first sentence, which says what a key is.
WHEN_TO_CHANGE = re.compile(r"\.\s(Add|Change|Choose|Leave|Lower|Raise|Set|Turn|Use)\s")


def read(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all rows whose first cell is code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def schema_keys() -> Iterator[tuple[str, str]]:
    """Every key of the JSON schema and its help."""
    schema = json.loads(recipe_schema())

    def walk(node: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
        if "$ref" in node:
            yield from walk(schema["$defs"][node["$ref"].rpartition("/")[2]], path)
        for option in node.get("anyOf", []):
            yield from walk(option, path)
        if "items" in node:
            yield from walk(node["items"], f"{path}[]")
        for name, child in node.get("properties", {}).items():
            key = f"{path}.{name}".lstrip(".")
            section = schema["$defs"].get(
                child.get("$ref", "").rpartition("/")[2], {}
            )  # has the help if it is the same
            yield key, child.get("description") or section.get("description", "")
            yield from walk(child, key)

    return walk(schema, "")


def recipe_rows() -> dict[str, list[str]]:
    text = re.sub(r"^## Types$.*?^## ", "## ", read("recipe.md"), flags=re.DOTALL | re.MULTILINE)
    return {cells[0].strip("`"): cells for cells in rows(text) if cells[0].strip("`") not in PRESETS}


def all_commands() -> Iterator[tuple[str, Any]]:
    """Every group and command with its words, as typer parses them."""

    def walk(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{words} {name}")

    return walk(typer.main.get_command(app), "z2a")


def command_sections() -> dict[str, str]:
    """The text below the heading of each command."""
    parts = re.split(r"^#+ (.+)$", read("cli.md"), flags=re.MULTILINE)
    return {heading.strip("`"): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_generated_text_is_current() -> None:
    stale = [path.relative_to(ROOT).as_posix() for path, text in generated().items() if path.read_text("utf-8") != text]
    assert not stale, f"out of date: {stale}; run python docs/generate_reference.py"


def test_a_table_must_name_what_the_code_has() -> None:
    table = "\n| extra | adds |\n|---|---|\n| `hf`, `gguf` | export |\n| `ray/` | clusters |\n"
    assert same_names(table, ["gguf", "hf", "ray"]) == table
    with pytest.raises(ValueError, match="add a row for wandb"):
        same_names(table, ["gguf", "hf", "ray", "wandb"])
    with pytest.raises(ValueError, match=r"unknown.*: ray"):
        same_names(table, ["gguf", "hf"])


def test_values_come_from_the_code() -> None:
    page = (ROOT / "recipes" / "README.md").read_text("utf-8")
    steps = yaml.safe_load((ROOT / "recipes" / "stories.yaml").read_text("utf-8"))["train"]["steps"]
    assert f"<!-- generated: stories.train.steps -->{steps}<!-- end -->" in page
    presets = [FRAGMENTS[name]("", True) for name in ("presets", "published-presets")]
    assert "、".join(presets) == "、".join(f"`{name}`" for name in PRESETS)
    assert FRAGMENTS["layers"]("\n".join(LAYER_TABLE), False).splitlines()[3].startswith("| 10 | `cli/`")


def test_every_recipe_key_is_on_the_page_and_no_other() -> None:
    assert sorted(recipe_rows()) == sorted(key for key, _ in schema_keys())


def test_every_recipe_key_has_a_type_and_a_sentence_of_help() -> None:
    wrong = [f"{key}: {text!r}" for key, text in schema_keys() if not SENTENCE.fullmatch(text)]
    assert not wrong, "\n".join(wrong)
    assert [key for key, cells in recipe_rows().items() if not (cells[1] and cells[5]) or "  " in cells[1]] == []


def test_every_recipe_key_says_when_to_change_it() -> None:
    texts = dict(schema_keys())
    missing = [key for key in VALUE_PATHS if not WHEN_TO_CHANGE.search(texts[key])]
    assert not missing, "\n".join(missing)


def test_keys_without_a_test_do_not_become_more() -> None:
    untested = [key for key in VALUE_PATHS if key not in key_tests()]
    assert len(untested) <= MAX_UNTESTED_KEYS, untested
    assert [key for key, cells in recipe_rows().items() if cells[4] == "no test"] == untested
    missing = [file for file in key_tests().values() if not (ROOT / "tests" / file).is_file()]
    assert not missing


def test_a_common_word_does_not_count_as_a_test_of_a_key() -> None:
    text = (
        'train(steps=3, lr=0.1, name="x"); {"threshold": 1, "peak": 2}; "name=adamw, schedule.peak"; tokens.verify(1)'
    )
    assert keys_set_in(text, "train") == set()
    assert keys_set_in("GuardRecipe(threshold=5)") == {"train.guard.threshold"}
    assert keys_set_in('f"train.guard={{threshold: {value}}}"') == {"train.guard", "train.guard.threshold"}
    assert keys_set_in('{"train": {"guard": {"skip": 3}}}') == {"train", "train.guard", "train.guard.skip"}


def test_every_preset_is_on_the_page() -> None:
    assert [cells[0].strip("`") for cells in rows(read("recipe.md")) if cells[0].strip("`") in PRESETS] == list(PRESETS)


def test_every_command_and_flag_is_on_the_page_and_no_other() -> None:
    sections = command_sections()
    assert sorted(name for name in sections if name.startswith("z2a")) == sorted(words for words, _ in all_commands())
    for words, command in all_commands():
        options = [one for one in command.params if one.param_type_name == "option"]
        expected = {flag for one in options for flag in [*one.opts, *one.secondary_opts]}
        expected |= {"-h", "--help"} if words == "z2a" else set()
        shown = [flag for cells in rows(sections[words]) for flag in re.findall(r"`(--?[a-z][\w-]*)`", cells[0])]
        assert sorted(shown) == sorted(expected), words
        arguments = [cells for cells in rows(sections[words]) if len(cells) == 2]
        assert len(arguments) == len(command.params) - len(options), words


def test_every_flag_and_argument_has_a_sentence_of_help() -> None:
    for words, command in all_commands():
        for one in command.params:
            if not TYPER_FLAGS & set(one.opts):
                assert SENTENCE.fullmatch(one.help or ""), f"{words} {one.opts[0]}: {one.help!r}"
        assert all(cells[-1] for cells in rows(command_sections()[words])), words


def test_defaults_of_flags_are_those_of_the_commands() -> None:
    sections = command_sections()
    for words, command in all_commands():
        shown = {flag: cells[2] for cells in rows(sections[words]) for flag in re.findall(r"`(--[\w-]+)`", cells[0])}
        for one in command.params:
            if one.param_type_name == "option" and not isinstance(one.default, bool):
                empty = one.default is None or one.default in ("", ())
                expected = "required" if one.required else "" if empty else f"`{one.default}`"
                assert shown[one.opts[0]].replace(".0`", "`") == expected.replace(".0`", "`"), f"{words} {one.opts[0]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_on_the_page_with_a_summary(package: str) -> None:
    source = Path(zero2all.__file__).parent.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^__all__ = (\[.*?\])", source, flags=re.DOTALL | re.MULTILINE)
    heading = f"## `zero2all.{package}`" if package else "## `zero2all`"
    _, _, rest = read("python.md").partition(f"\n{heading}\n")
    parts = re.split(r"^### `(\w+)`$", rest.partition("\n## ")[0], flags=re.MULTILINE)
    assert parts[0].strip()
    assert sorted(parts[1::2]) == sorted(ast.literal_eval(found[1]) if found else [])
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        summary = text.split("```")[2].strip().partition("\n\n")[0]
        assert SENTENCE.fullmatch(summary) or summary.startswith("`"), f"{name}: {summary!r}"


def test_pages_name_no_place_of_this_machine() -> None:
    for path in REFERENCE.glob("*.md"):
        text = read(path.name)
        assert str(ROOT) not in text
        assert str(Path.home()) not in text
        assert not re.search(r"0x[0-9a-f]{6,}|Posix|<function|<class", text)
