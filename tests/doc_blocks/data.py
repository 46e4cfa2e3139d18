"""Pages about data and tokenizers whose blocks run as printed, and what they need."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tests.doc_pages import ROOT, Page, Sandbox, prepare_run, prepare_stages, prepare_text

PATIENCE = 60.0  # seconds for the servers to start
ENGLISH = [text for _, text in sorted(topics.items()) if len(text) > 500]


def chinese_paragraphs() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.zh-CN.md"))]
    return [part for page in pages for part in page.split("\n\n") if len(part) > 60]


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def prepare_raw(page: Sandbox) -> None:
    """A recipe with finished stages, and raw files in the shapes and places that the recipes of the pages name."""
    prepare_stages(page)
    prepare_text(page)
    english, chinese = ENGLISH[:60], chinese_paragraphs()
    place = {name: page.work / name for name in ("raw", "data", "eval")}
    articles = [{"id": str(number), "title": f"t{number}", "text": text} for number, text in enumerate(english)]
    for path in ("data/wiki", "raw/wiki", "raw/wikipedia", "raw/en"):
        write_lines(page.work / path / "a.jsonl", articles)
    questions = [
        {"qid": f"q{number}", "category": "c", "title": f"第{number}题", "desc": "", "answer": text}
        for number, text in enumerate(chinese)
    ]
    for path in ("data/qa", "raw/baike2018qa", "raw/forum"):
        write_lines(page.work / path / "a.jsonl", questions)
    webtext = [{"qid": one["qid"], "title": one["title"], "content": one["answer"]} for one in questions]
    write_lines(place["raw"] / "webtext2019zh" / "a.jsonl", webtext)
    write_lines(place["raw"] / "new2016zh" / "a.jsonl", ({"news_id": one["qid"], **one} for one in webtext))
    write_lines(place["raw"] / "WuDaoCorpus" / "a.jsonl", ({"uniqueKey": one["qid"], **one} for one in webtext))
    zhihu = [{"INSTRUCTION": one["title"], "RESPONSE": one["answer"], "SOURCE": "c"} for one in questions]
    write_lines(place["raw"] / "Zhihu-KOL" / "a.jsonl", zhihu)
    write_lines(place["raw"] / "web" / "a.jsonl", ({"body": text, "meta": {"title": "t"}} for text in english))
    write_lines(page.work / "crawl.jsonl", ({"text": f"BUY NOW {number} !!! " * 20} for number in range(20)))
    chats = [
        {"conversations": [{"from": "human", "value": f"What is {number}?"}, {"from": "gpt", "value": text}]}
        for number, text in enumerate(english)
    ]
    write_lines(place["raw"] / "sft" / "chats.jsonl", chats)
    tests = [{"question": f"{text[:200]} {number}", "answer": str(number)} for number, text in enumerate(ENGLISH[-9:])]
    write_lines(place["eval"] / "gsm8k_test.jsonl", tests)
    write_lines(place["eval"] / "cmmlu" / "a.jsonl", ({"题目": f"第{number}道题目。" * 9} for number in range(9)))
    shutil.copytree(ROOT / "src" / "zero2all" / "recipe", place["raw"] / "code")
    with tarfile.open(place["data"] / "repos.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "src" / "zero2all" / "recipe", "recipe")


def prepare_downloads(page: Sandbox) -> None:
    """The same, and servers with the repositories and files that the pages name."""
    prepare_raw(page)
    addresses = page.home / "addresses.json"
    environment = {**page.environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.doc_blocks.hub", str(addresses)]
    servers = subprocess.Popen(command, cwd=ROOT, env=environment)  # the sandbox stops it by its mark
    deadline = time.monotonic() + PATIENCE
    while not addresses.exists():
        assert servers.poll() is None, "the servers have ended"
        assert time.monotonic() < deadline, "the servers do not start"
        time.sleep(0.1)
    page.values.update(json.loads(addresses.read_text(encoding="utf-8")))
    page.environment["HF_ENDPOINT"] = page.values["hub"]


def prepare_tokenizers(page: Sandbox) -> None:
    """A finished run, its export, a sentencepiece model and the text to extend with."""
    prepare_run(page)
    page.z2a("export", "runs/mine", "--to", "exported")
    page.z2a(
        "tokenizer", "train", "my.yaml", "tokenizer.trainer=sentencepiece-bpe", "tokenizer.vocab_size=1024",
        "tokenizer.dir=llama",
    )  # fmt: skip
    shutil.copytree(page.work / "runs" / "mine" / "tokenizer", page.work / "qwen3")
    page.z2a("tokenizer", "import", "llama/tokenizer.model", "--out", "llama-tokenizer")
    for directory, texts in (("medicine", ENGLISH[:40]), ("zh", chinese_paragraphs())):
        (page.work / directory).mkdir()
        (page.work / directory / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    write_lines(page.work / "zh.jsonl", ({"text": text} for text in chinese_paragraphs()[:40]))
    (page.work / "en.txt").write_text(ENGLISH[0], encoding="utf-8")


MIRROR = {"https://hf-mirror.com": "{hub}"}
PAGES = [
    Page("docs/how-to/data/prepare.md", prepare_raw),
    Page("docs/how-to/data/fetch.md", prepare_downloads, {**MIRROR, "https://host/": "{files}/"}),
    Page("docs/how-to/data/input-formats.md", prepare_raw),
    Page("docs/how-to/data/filters.md", prepare_raw),
    Page("docs/how-to/data/deduplicate.md", prepare_raw),
    Page("docs/how-to/data/decontaminate.md", prepare_raw),
    Page("docs/how-to/data/validation-split.md", prepare_raw),
    Page("docs/how-to/data/conversations.md", prepare_raw),
    Page(
        "docs/how-to/data/chinese.md", prepare_downloads, {**MIRROR, "vocab_size: 65536": "vocab_size: 512"},
        recipe="chinese.yaml",
    ),
    Page("docs/how-to/tokenizer/train.md", prepare_stages, {"tokenizer.vocab_size=32768": "tokenizer.vocab_size=512"}),
    Page("docs/how-to/tokenizer/import.md", prepare_tokenizers),
    Page("docs/how-to/tokenizer/extend.md", prepare_tokenizers, {"--add 4000": "--add 40"}),
    Page("docs/how-to/tokenizer/evaluate.md", prepare_tokenizers),
    Page("docs/how-to/tokenizer/special-tokens.md", prepare_stages),
    Page("docs/explain/bpe.md", lambda page: None),
]  # fmt: skip
NOT_RUN = {
    "docs/how-to/data/object-storage.md": "needs an S3 server; tests/corpus/test_s3.py has one",
    "docs/how-to/data/ray.md": "needs several machines; tests/corpus/test_ray.py has a cluster of processes",
}
