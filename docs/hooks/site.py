"""What the site changes about a page, so that the same file reads well where the repository is hosted.

Links that leave docs/ lead to the repository, at the address that pyproject.toml declares; without one they become the
text and the path. The line that links to the other language goes: the site has a menu for it. Terms of the glossary
get their definition as a hint. Redirects are written for both languages.
"""

from __future__ import annotations

import functools
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SUFFIX = ".zh-CN.md"
OTHER_LANGUAGE = re.compile(r"^\[(?:中文|English)\]\([^)]*\)\n+", re.MULTILINE)
# A fenced block, a code span or a link with its text: whichever starts first is the one.
BLOCK_OR_LINK = re.compile(
    r"^[ ]*(?P<fence>`{3,}).*?^[ ]*(?P=fence)[ ]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
    r"|\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
EXTERNAL = re.compile(r"[a-z]+:|//|#", re.IGNORECASE)
ACRONYM = re.compile(r"[A-Z0-9][A-Z0-9-]*[A-Z][A-Z0-9-]*\Z|bpb\Z|muP\Z")
MOVED = re.compile(r"^(\S+)\.md -> (\S+)\.md$")
REDIRECT = """\
<!doctype html>
<meta charset="utf-8">
<title>{url}</title>
<link rel="canonical" href="{url}">
<meta http-equiv="refresh" content="0; url={url}">
<script>location.replace("{url}" + location.hash)</script>
<a href="{url}">{url}</a>
"""


@functools.cache
def repository() -> str:
    """The public address of the repository, or nothing as long as there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"].rstrip("/")


def on_config(config: Any) -> Any:
    config.repo_url = repository() or None
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri
    chinese = source.endswith(SUFFIX)
    text = without_language_line(markdown)
    text = with_repository_links(text, source, repository())
    terms = glossary("reference/glossary" + (SUFFIX if chinese else ".md"))
    if not source.startswith("reference/glossary"):
        text += "\n" + "".join(f"\n*[{term}]: {definition}" for term, definition in terms)
    return text


def on_post_build(config: Any) -> None:
    """Called once for each language; a page that exists is never replaced."""
    for old, new in redirects((DOCS / "redirects.txt").read_text("utf-8")):
        for language in ("", "zh-CN/"):
            write_redirect(Path(config.site_dir), language + old, language + new)


def without_language_line(markdown: str) -> str:
    return OTHER_LANGUAGE.sub("", markdown, count=1)


def with_repository_links(markdown: str, source: str, address: str) -> str:
    """Links to files that are not part of the site, such as recipes and sources, as links to the repository."""

    def rewritten(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or EXTERNAL.match(target):
            return match[0]
        name, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), name))
        if is_part_of_site(path) or not (ROOT / path).exists():
            return match[0]  # if there is no such file, the build says so
        # Titles of links inside a title: the text may hold links to files as well, but none of ours does.
        if not address:
            return without_address(match["text"], path)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{match['text']}]({address}/{kind}/main/{path}{hash_}{anchor})"

    return BLOCK_OR_LINK.sub(rewritten, markdown)


def without_address(text: str, path: str) -> str:
    """The text of a link, and the path in the repository if the text does not name it."""
    name = path.rpartition("/")[2]
    return text if name in text else f"{text} (`{path}`)"


def is_part_of_site(path: str) -> bool:
    folder, _, rest = path.partition("/")
    kept_out = rest.startswith(("hooks", "picture_maker", "reference_generator")) or path.endswith((".py", ".txt"))
    return folder == "docs" and not kept_out


@functools.cache
def glossary(name: str) -> list[tuple[str, str]]:
    """Abbreviations and their definitions, from the tables of the glossary: those whose definition is one sentence."""
    path = DOCS / name
    if not path.exists():
        return []
    found = []
    for line in path.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        names = [cell for cell in cells[:2] if ACRONYM.match(cell)]
        if len(cells) >= 4 and names:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", max(cells[2:], key=len))
            found.append((names[0], text))
    return found


def redirects(text: str) -> Iterator[tuple[str, str]]:
    """Old and new path of each line ``old.md -> new.md``, without the ending."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = MOVED.match(line)
            if match is None:
                raise ValueError(f"docs/redirects.txt: {line!r} is not 'old.md -> new.md'")
            yield match[1], match[2]


def directory_of(page: str) -> str:
    """Where the site has a page: ``a/b`` in ``a/b/``, ``a/index`` in ``a/``."""
    return page.removesuffix("index").rstrip("/")


def write_redirect(site: Path, old: str, new: str) -> None:
    path = site / directory_of(old) / "index.html"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        url = posixpath.relpath(directory_of(new) or ".", directory_of(old)) + "/"
        path.write_text(REDIRECT.format(url=url), encoding="utf-8")
