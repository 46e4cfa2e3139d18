"""The documentation site: it builds without a warning in both languages, and its hook changes only what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reference_generator.llms import pages_of, site_config, title_and_first_sentence

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_BUILD_SECONDS = 60  # of a processor, so that a busy machine does not count
ENGLISH_ONLY = {"reference/python.md", "reference/plugins.md"}  # the Chinese site has them in English
NAV = [page for _, page in pages_of(site_config()["nav"])]
EXTERNAL = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]+"')
_spec = importlib.util.spec_from_file_location("site_hook", DOCS / "hooks" / "site.py")
assert _spec is not None
assert _spec.loader is not None
hook = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hook)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site") / "site"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_BUILD_SECONDS
    return out


def url_of(page: str) -> str:
    """The directory of a page in the site."""
    name = page.removesuffix(".md")
    return "" if name == "index" else f"{name.removesuffix('/index')}/"


@pytest.mark.slow
def test_every_page_is_there_in_both_languages(site: Path) -> None:
    wanted = [f"{where}{url_of(page)}" for where in ("", "zh-CN/") for page in NAV]
    assert [one for one in wanted if not (site / one / "index.html").is_file()] == []
    for page in ("start/install.md", "how-to/survive/hang.md"):
        for where, language in (("", "en"), ("zh-CN/", "zh")):
            text = (site / where / url_of(page) / "index.html").read_text("utf-8")
            assert f'<html lang="{language}"' in text
            assert 'name="viewport"' in text
            assert "content.code.copy" in text
            assert 'data-md-color-scheme="slate"' in text
            assert 'hreflang="zh-CN"' in text


@pytest.mark.slow
def test_no_page_asks_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 2 * len(NAV)
    assert [(path.name, found) for path in pages for found in EXTERNAL.findall(path.read_text("utf-8"))] == []


@pytest.mark.slow
def test_the_search_finds_words_of_both_languages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    texts = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert any("checkpoint" in text for where, text in texts.items() if not where.startswith("zh-CN/"))
    chinese = [text for where, text in texts.items() if where.startswith("zh-CN/")]
    assert any("\u200b分词器\u200b" in text or "\u200b训练\u200b" in text for text in chinese), "jieba marks words"
    assert {"en", "zh"} <= set(index["config"]["lang"])


@pytest.mark.slow
def test_every_redirect_leads_to_a_page(site: Path) -> None:
    for old, new in hook.redirects((DOCS / "redirects.txt").read_text("utf-8")):
        assert not (DOCS / f"{old}.md").exists(), f"{old} is still a page"
        for where in ("", "zh-CN/"):
            page = site / where / hook.directory_of(old) / "index.html"
            found = re.search(r'url=([^"]+)"', page.read_text("utf-8"))
            assert found is not None
            assert (page.parent / found[1] / "index.html").is_file(), f"{old} -> {new}"


@pytest.mark.slow
def test_links_of_the_built_site_lead_somewhere(site: Path) -> None:
    lychee = shutil.which("lychee", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert lychee, "pip install -e '.[docs]'"
    done = subprocess.run(
        [lychee, "--offline", "--no-progress", "--include-fragments=anchor-only", "--index-files", "index.html",
         "--root-dir", str(site), "--exclude-path", "404.html", f"{site}/**/*.html"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_page_of_the_nav_has_a_chinese_twin_and_every_file_is_in_the_nav() -> None:
    files = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    twins = {page.replace(".md", ".zh-CN.md") for page in NAV if page not in ENGLISH_ONLY}
    assert sorted(files ^ {*NAV, *twins}) == []
    assert len(NAV) == len(set(NAV))


def test_every_section_of_the_nav_has_a_chinese_name() -> None:
    config = site_config()
    [i18n] = [one["i18n"] for one in config["plugins"] if "i18n" in one]
    [chinese] = [one for one in i18n["languages"] if one["locale"] == "zh-CN"]
    titles = {title for titles, _ in pages_of(config["nav"]) for title in titles} | {"Home"}
    assert set(chinese["nav_translations"]) == titles


@pytest.mark.parametrize(
    ("text", "address", "expected"),
    [
        ("[the recipes](../recipes/README.md)", "", "the recipes (`recipes/README.md`)"),
        ("[SECURITY.md](../SECURITY.md#report)", "", "SECURITY.md"),
        ("[`units.py`](../src/zero2all/base/units.py)", "", "`units.py`"),
        ("[x](../SECURITY.md#report)", "https://a.org/b", "[x](https://a.org/b/blob/main/SECURITY.md#report)"),
        ("[x](../recipes)", "https://a.org/b", "[x](https://a.org/b/tree/main/recipes)"),
        ("[the hook](hooks/site.py)", "", "the hook (`docs/hooks/site.py`)"),
        ("[page](start/install.md) [away](https://a.org) [here](#part)", "", None),
        ("[missing](../nowhere.md)", "", None),
        ("```sh\n[x](../SECURITY.md)\n```\n`[x](../SECURITY.md)`", "", None),
    ],
)
def test_links_that_leave_the_site(text: str, address: str, expected: str | None) -> None:
    assert hook.with_repository_links(text, "index.md", address) == (text if expected is None else expected)


def test_the_line_to_the_other_language_is_left_out() -> None:
    assert hook.without_language_line("# A\n\n[中文](a.zh-CN.md)\n\nText [中文](b) x\n") == "# A\n\nText [中文](b) x\n"


def test_redirects_are_relative_and_never_replace_a_page(tmp_path: Path) -> None:
    assert list(hook.redirects("# why\na/b.md -> c.md\n\nd.md -> e/index.md\n")) == [("a/b", "c"), ("d", "e/index")]
    with pytest.raises(ValueError, match="is not 'old"):
        list(hook.redirects("a.md => b.md"))
    hook.write_redirect(tmp_path, "a/b", "c/d")
    assert 'url=../../c/d/"' in (tmp_path / "a" / "b" / "index.html").read_text("utf-8")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "index.html").write_text("a page")
    hook.write_redirect(tmp_path, "e", "c")
    assert (tmp_path / "e" / "index.html").read_text("utf-8") == "a page"


def test_abbreviations_come_from_the_glossary() -> None:
    terms = dict(hook.glossary("reference/glossary.md"))
    assert "BPE" in terms
    assert all("|" not in text and "](" not in text for text in terms.values())


def test_the_map_for_programs_has_the_first_sentence_of_a_page() -> None:
    page = "# Fetch\n\n<!-- generated -->\n\n![a](b.svg)\n\nUse this when *text* is [away](x.md): it comes.\n"
    assert title_and_first_sentence(page) == ("Fetch", "Use this when text is away")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_lists_and_blocks_render_as_they_are_meant(path: Path) -> None:
    """The site needs an empty line before a list, and four spaces for what is inside an element."""
    lines = path.read_text("utf-8").splitlines()
    found, fence, previous = [], "", ""
    for number, line in enumerate(lines, 1):
        if match := re.match(r" *(`{3,})", line):
            indent = len(line) - len(line.lstrip())
            found += [f"{number}: indent the block by four spaces"] if indent % 4 and not fence else []
            fence = "" if fence == match[1] else fence or match[1]
        elif not fence and (item := re.match(r"( *)(?:[-*]|\d+\.) +\S", line)):
            starts = previous and not re.match(r" *(?:[-*]|\d+\.) | +\S|#|<!--", previous)
            found += [f"{number}: an empty line before the list"] if starts else []
            found += [f"{number}: indent by four spaces"] if len(item[1]) % 4 else []
        previous = line.rstrip()
    assert found == []
