"""Counts, lists and tables inside pages, between ``<!-- generated: NAME -->`` and ``<!-- end -->``.

A value is written from the code. A table has a description for each of its rows, which nobody can generate: its names
are compared with those of the code, and the error says which row is missing or too many.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.chaos.faults import FAULTS

from reference_generator.architecture import CODE, layer_numbers, numbered, package_layers
from reference_generator.evidence import MEASUREMENTS, fault_tables, measurements, parity_tables
from reference_generator.gpus import gpu_table
from reference_generator.how_large import HARDWARE, cpu_sizes, gpu_sizes
from zero2all.base.plugins import builtin_names
from zero2all.base.units import Duration, show_count
from zero2all.base.workspace import MAX_DEPTH
from zero2all.cli.bench import app as bench_app
from zero2all.model.cost.model_size import count_parameters
from zero2all.quickstart import CONVERSATIONS_PER_LANGUAGE, STORIES_PER_LANGUAGE
from zero2all.recipe import PRESETS, Recipe, builtin_recipe_path, load_recipe_or_preset
from zero2all.storyworld import LANGUAGES
from zero2all.track.health_checks import MESSAGES
from zero2all.track.prometheus import FAMILIES
from zero2all.train.step_timer import PARTS

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "recipes/*.md", "examples/*.md")
FRAGMENT = re.compile(r"<!-- generated: ([\w.-]+) -->(.*?)<!-- end -->", re.DOTALL)
CELL = re.compile(r"^(.+?)(?: \(\*\))?$")  # (*) refers to a note
STEP_PART = re.compile(r"`time/(\w+)`")
RULE = re.compile(r"^[a-z ]+(?<! )")  # a Chinese name may follow
SHAPE = (
    "vocabulary {recipe.tokenizer.vocab_size:,}, {recipe.model.num_hidden_layers} layers, "
    "sequences of {recipe.train.seq_len:,} tokens, batches of {recipe.train.batch_tokens:,}"
)
SHAPE_CHINESE = (
    "词表大小 {recipe.tokenizer.vocab_size:,}，{recipe.model.num_hidden_layers} 层，"
    "序列长度 {recipe.train.seq_len:,} token，batch size {recipe.train.batch_tokens:,} token"
)


def filled_pages() -> dict[Path, str]:
    """Each page with a generated part, and its text as it should be."""
    found = {}
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        text = path.read_text("utf-8")
        if FRAGMENT.search(text):
            found[path] = FRAGMENT.sub(functools.partial(_filled, path), text)
    return found


def _filled(path: Path, match: re.Match[str]) -> str:
    name, text = match.groups()
    try:
        chinese = path.name.endswith(".zh-CN.md")
        new = recipe_value(name, chinese) if "." in name else FRAGMENTS[name](text, chinese)
    except ValueError as error:
        raise ValueError(f"{path.relative_to(ROOT)}, {name}: {error}") from None
    return f"<!-- generated: {name} -->{new}<!-- end -->"


def joined(names: Iterable[str], chinese: bool) -> str:
    """Names in code font, as a list in a sentence."""
    *others, last = [f"`{name}`" for name in names]
    if chinese:
        return "、".join([*others, last])
    return f"{', '.join(others)} and {last}" if others else last


def same_names(text: str, expected: Iterable[str], column: int = 0, pattern: re.Pattern[str] = CODE) -> str:
    """A table whose column has each of these names once, and no other."""
    expected = list(expected)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.strip().splitlines()[2:]]
    shown = [name for row in rows for name in pattern.findall(row[column])]
    if missing := [name for name in expected if name not in shown]:
        raise ValueError(f"add a row for {', '.join(missing)}")
    if surplus := sorted({name for name in shown if name not in expected or shown.count(name) > 1}):
        raise ValueError(f"unknown, or more than one row: {', '.join(surplus)}")
    return text


@functools.cache
def pyproject() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def extras() -> dict[str, list[str]]:
    return pyproject()["project"]["optional-dependencies"]


def extras_outside_dev(text: str, chinese: bool) -> str:
    [own] = [one for one in extras()["dev"] if one.startswith("zero2all[")]
    return joined(sorted(set(extras()) - {"dev"} - set(re.findall(r"[\w-]+", own))), chinese)


def layers(text: str, chinese: bool) -> str:
    """The table of packages, with the numbers of their layers."""
    numbers = layer_numbers(package_layers(pyproject()))
    return numbered(same_names(text, numbers, column=1), numbers)


def health_rules() -> set[str]:
    """Of keys such as ``bad dead source: missing``."""
    return {key.partition(" ")[2].partition(":")[0] for key in MESSAGES}


def bench_commands() -> list[str]:
    return [one.name or getattr(one.callback, "__name__", "") for one in bench_app.registered_commands]


@functools.cache
def recipe(name: str) -> Recipe:
    return load_recipe_or_preset(str(builtin_recipe_path(f"{name}.yaml")))


def recipe_value(name: str, chinese: bool) -> str:
    """A key of a recipe of ours (``stories.train.steps``), or its ``parameters``, ``tokens`` or ``shape``."""
    file, _, key = name.partition(".")
    found = recipe(file)
    if key == "parameters":
        return show_count(count_parameters(found.model).total)
    if key == "tokens":
        return show_count(found.train.steps * found.train.batch_tokens)
    if key == "shape":
        words = SHAPE_CHINESE if chinese else SHAPE
        return words.format(recipe=found)
    value = functools.reduce(getattr, key.split("."), found)
    return f"{value.value if isinstance(value, Duration) else value:,}"


def _gpu_sizes(name: str, text: str, chinese: bool) -> str:
    return gpu_sizes(name, chinese)


Fragment = Callable[[str, bool], str]
"""From the text between the markers, and whether the page is Chinese, to the text that should be there."""
FRAGMENTS: dict[str, Fragment] = {
    "extras": lambda text, chinese: same_names(text, extras().keys() - {"docs"}),  # builds the site; no user needs it
    "extras-outside-dev": extras_outside_dev,
    "layers": layers,
    "optimizers": lambda text, chinese: same_names(text, builtin_names("optimizer")),
    "presets": lambda text, chinese: joined([name for name in PRESETS if name.startswith("z2all-")], chinese),
    "published-presets": lambda text, chinese: joined(
        [name for name in PRESETS if not name.startswith("z2all-")], chinese
    ),
    "bench-commands": lambda text, chinese: joined(bench_commands(), chinese),
    "gpus": gpu_table,
    "fault-tables": fault_tables,
    "parity-tables": parity_tables,
    **{f"measurements-{name}": lambda text, chinese, name=name: measurements(name, chinese) for name in MEASUREMENTS},
    "faults": lambda text, chinese: str(len(FAULTS)),
    "health-rules": lambda text, chinese: same_names(text, health_rules(), pattern=RULE),
    "prometheus": lambda text, chinese: same_names(text, (one.name.removeprefix("zero2all_") for one in FAMILIES)),
    "step-parts": lambda text, chinese: same_names(text, PARTS, pattern=STEP_PART),
    "run-depth": lambda text, chinese: str(MAX_DEPTH),
    "stories": lambda text, chinese: f"{STORIES_PER_LANGUAGE:,}",
    "all-stories": lambda text, chinese: f"{STORIES_PER_LANGUAGE * len(LANGUAGES):,}",
    "how-large-cpu": lambda text, chinese: cpu_sizes(chinese),
    **{name: functools.partial(_gpu_sizes, name) for name in HARDWARE},
    "all-conversations": lambda text, chinese: f"{CONVERSATIONS_PER_LANGUAGE * len(LANGUAGES):,}",
}
