"""Blocks of README, recipes and the guides run as printed, in .ci/long; both languages have them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from sybil import Example
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

from tests import doc_blocks
from tests.doc_pages import (
    MARKED,
    ROOT,
    Page,
    Sandbox,
    prepare_recipes,
    prepare_text,
    recipe_with,
    sandbox,
)
from tests.test_doc_commands import EXECUTED, page_commands
from tests.test_docs import ENGLISH

SMALL_MODEL = "{{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, qk_norm: true}}"
PAGES = [
    Page(
        "README.md", prepare_text,
        {"--chat --out runs/first": "--chat --out runs/first train.steps=330",
         "z2a chat runs/first/chat": "echo 'Tell me a story.' | z2a chat runs/first/chat",
         "vocab_size: 16384": "vocab_size: 512", "{preset: z2all-25m}": SMALL_MODEL, "tokens: 500M": "tokens: 20Ki",
         "seq_len: 1024": "seq_len: 64", "batch_tokens: 128Ki": "batch_tokens: 1Ki", "10M tokens": "5Ki tokens",
         "--nproc-per-node 8": "--nproc-per-node 2"},
        recipe="mine.yaml", in_clone=True, own_venv=True,
    ),
    Page(
        "recipes/README.md", prepare_recipes,
        {"--out runs/first": "--out runs/first train.steps=20", "--out runs/mine": "--out runs/mine train.steps=20",
         "--nproc-per-node 8": "--nproc-per-node 2"},
        in_clone=True,
    ),
]  # fmt: skip

ALL_PAGES = [*PAGES, *doc_blocks.pages()]
# Pages outside the areas of tests/doc_blocks whose blocks run elsewhere, or cannot.
NOT_RUN = {
    "AGENTS.md": "installs and runs the gate",
    "CONTRIBUTING.md": "installs and runs the gate",
    "SECURITY.md": "its commands need a cluster",
    "examples/README.md": "tests/test_examples.py runs every command",
    "docs/reference/cli.md": "generated; tests/test_doc_commands.py parses its examples",
    "docs/reference/python.md": "generated; doctests",
}


class Blocks:
    """Sybil's evaluators for one page."""

    def __init__(self, page: Page, box: Sandbox | None = None) -> None:
        self.page, self.box = page, box
        self.document = Document.parse(
            str(ROOT / page.path),
            CodeBlockParser("sh", self._shell),
            CodeBlockParser("python", self._python),
            CodeBlockParser("yaml", self._recipe),
        )

    def sources(self, language: str) -> list[str]:
        examples = self.document.examples()
        return [str(one.parsed) for one in examples if one.region.lexemes["arguments"] == language]

    def run(self) -> None:
        assert self.box is not None
        for text in self.sources("yaml"):  # commands may be printed before the recipe, or before the probes
            if is_whole_recipe(text):
                self.box.write_recipe(text)
            elif is_suite(text):
                (self.box.work / "mine.yaml").write_text(text, encoding="utf-8")
        for example in self.document.examples():
            try:
                example.evaluate()
            except AssertionError as error:
                raise AssertionError(f"{self.page.path}, line {example.line}: {error}") from error

    def _shell(self, example: Example) -> None:
        assert self.box is not None
        self.box.shell(str(example.parsed))

    def _python(self, example: Example) -> None:
        """A block that begins with the name of a file is that file; another one is run."""
        assert self.box is not None
        text = str(example.parsed)
        if named := re.match(r"# ([\w/]+\.py)\n", text):
            (self.box.work / named[1]).write_text(text, encoding="utf-8")
        else:
            (self.box.work / "block.py").write_text(text, encoding="utf-8")
            self.box.shell("python block.py")

    def _recipe(self, example: Example) -> None:
        """A recipe as printed is valid; a part of one is valid in a recipe, and a corpus is built with it."""
        assert self.box is not None
        text = str(example.parsed)
        if is_suite(text):  # 'z2a eval probes' reads it
            return
        part = None if is_whole_recipe(text) else yaml.safe_load(text)
        if part is not None:
            text = yaml.safe_dump(recipe_with(self.box, part), sort_keys=False)
        (self.box.work / "printed.yaml").write_text(text, encoding="utf-8")
        without_weights = " train.init=null" if "init:" in text else ""  # those of a test are of another size
        self.box.shell(f"z2a recipe check printed.yaml{without_weights}")
        if part is not None and "corpus" in part:
            self.box.shell("z2a corpus build printed.yaml")


def is_whole_recipe(text: str) -> bool:
    return text.startswith("name:") and not is_suite(text)


def is_suite(text: str) -> bool:
    return "\nprobes:\n" in text


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.path)
def test_blocks_run_as_printed(page: Page, tmp_path: Path, workspace: Path) -> None:
    text = (ROOT / page.path).read_text(encoding="utf-8")
    stale = [printed for printed in page.changes if printed not in text]
    assert not stale, f"not on the page any more: {stale}"
    for tool in ("jq", "tmux"):
        if f"{tool} " in "".join(Blocks(page).sources("sh")) and shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    with sandbox(page, tmp_path, workspace) as box:
        Blocks(page, box).run()


def test_every_page_with_commands_is_executed() -> None:
    """By this file, in the gate, or there is a reason why not."""
    commands = {page for page in ENGLISH if page != "CHANGELOG.md" and page_commands(page)}
    reasons = {**NOT_RUN, **doc_blocks.not_run()}
    run = [page.path for page in ALL_PAGES]
    assert sorted(commands - {*run, *EXECUTED, *reasons}) == [], "add a Page, or NOT_RUN with the reason"
    assert sorted({*run, *reasons} - {*ENGLISH}) == [], "no such page"
    assert len(run) == len(set(run)), "two entries for one page"
    assert [page for page in reasons if page in run or not reasons[page].strip()] == []


def test_fewer_than_a_tenth_of_the_blocks_have_a_command_that_is_not_run() -> None:
    blocks = [text for page in ALL_PAGES for language in ("sh", "python") for text in Blocks(page).sources(language)]
    marked = [
        text for text in blocks if any(re.search(rf"^{re.escape(name)}\b", text, re.MULTILINE) for name in MARKED)
    ]
    assert marked, "the list of commands that are not run is empty: remove this test"
    assert len(marked) < len(blocks) / 10, f"{len(marked)} of {len(blocks)}"
