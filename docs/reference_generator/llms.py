"""llms.txt, a map of the documentation for programs: the nav of mkdocs.yml, with the first sentence of each page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LLMS = ROOT / "llms.txt"
INTRODUCTION = """\
# zero2all

> A Python and PyTorch toolkit that pretrains language models from raw text, end to end: corpus cleaning and
> deduplication, bounded-memory BPE tokenizer training, Megatron-compatible token store, distributed and fault-tolerant
> training, validation, fine-tuning and alignment, Hugging Face and GGUF export, an OpenAI-compatible server. One
> command (`z2a`), one YAML recipe. Apache-2.0. Alpha.

Every stage is a command and a Python function that reads and writes directories. Every command takes `--json` and has
an example in `--help`. `z2a recipe schema` prints the JSON Schema of recipes, `z2a recipe check` reports every mistake.
"""
REPOSITORY = """\
## Repository

- [README](README.md): quickstart, four claims with their proofs, limitations
- [Recipes](recipes/README.md): the recipes that ship with zero2all
- [Examples](examples/README.md): custom filter, custom sink, reading a token store, resuming on other ranks
- [Notes for coding agents](AGENTS.md): build, test, where things are
- [Contributing](CONTRIBUTING.md): how to add a package, a stage, a test
- [Changelog](CHANGELOG.md): what users of each version notice
- [Security](SECURITY.md): what is protected from whom, and how to report a vulnerability
"""
MAX_WORDS = 25


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects of its extensions."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def site_config() -> dict[str, Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)  # a safe loader, see above


def pages_of(nav: list[Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The titles of the sections that lead to each page, and the page."""
    for entry in nav:
        if isinstance(entry, str):
            yield above, entry
        else:
            [(title, inside)] = entry.items()
            yield from [(above, inside)] if isinstance(inside, str) else pages_of(inside, (*above, title))


def llms_text() -> str:
    """A page that is not written yet is left out; the build of the site reports it."""
    parts, section = [INTRODUCTION], None
    for titles, name in pages_of(site_config()["nav"]):
        path = ROOT / "docs" / name
        if not path.exists():
            continue
        if titles != section:
            parts.append(f"\n## {': '.join(titles) or 'Start here'}\n\n")
            section = titles
        title, about = title_and_first_sentence(path.read_text("utf-8"))
        parts.append(f"- [{title}](docs/{name}){': ' if about else ''}{about}\n")
    return "".join([*parts, "\n", REPOSITORY])


def title_and_first_sentence(text: str) -> tuple[str, str]:
    """The heading, and the first sentence below it as plain text."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    title, rest = (heading[1], text[heading.end() :]) if heading else ("", text)
    rest = re.sub(r"<!--.*?-->", "", rest, flags=re.DOTALL)
    paragraphs = [" ".join(one.split()) for one in re.split(r"\n\s*\n", rest)]
    prose = next((one for one in paragraphs if re.match(r"[*_`]*[A-Z]", one) and " · " not in one), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).replace("*", "")
    sentence = re.split(r"(?<=[.:!?])\s", plain, maxsplit=1)[0].rstrip(".:")
    words = sentence.split()
    return plain_title(title), " ".join(words[:MAX_WORDS]) + (" …" if len(words) > MAX_WORDS else "")


def plain_title(title: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip()
