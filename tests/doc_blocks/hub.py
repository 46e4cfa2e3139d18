"""A Hub with several repositories and a web server for pages that download: ``python -m tests.doc_blocks.hub FILE``.

Their addresses are written to FILE. They run until the process is stopped.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.corpus.download_server import FakeHub, Page, Server, Text
from zero2all.base.io import write_json

RECORDS = [{"id": str(number), "title": "t", "text": f"Line {number} of a page.\n" * 9} for number in range(40)]
ANSWER = "一个由很多不同的字组成的回答，长到足以留在语料里。" * 3
QUESTIONS = [{"INSTRUCTION": f"第{number}问", "RESPONSE": f"{number}：{ANSWER}"} for number in range(40)]
TEXT, ANSWERED = ("".join(json.dumps(one) + "\n" for one in records) for records in (RECORDS, QUESTIONS))
REPOSITORIES = {
    "datasets/Salesforce/wikitext": {"wikitext-2-v1/train.jsonl": TEXT, "wikitext-103-v1/train.jsonl": TEXT},
    "datasets/wangrui6/Zhihu-KOL": {"data/train.jsonl": ANSWERED},
    "datasets/wikimedia/wikipedia": {"20231101.zh/train.jsonl": TEXT, "20231101.en/train.jsonl": TEXT},
    "models/Qwen/Qwen3-0.6B": {"config.json": "{}", "pytorch_model.bin": "weights"},
}
FILES = ("a.jsonl.gz", "b.jsonl.gz")  # "test", whose checksum the page has


class Hubs(Server):
    """All repositories at one address."""

    def __init__(self, store: Server) -> None:
        super().__init__()
        self.hubs = [FakeHub(store, place) for place in REPOSITORIES]
        for hub, files in zip(self.hubs, REPOSITORIES.values(), strict=True):
            hub.page_size, hub.next_host = 1000, self.url
            for name, text in files.items():
                hub.add_file(name, Text(text.encode()), lfs=False)

    def answer(self, request: Any) -> None:
        path = unquote(urlsplit(request.path).path)
        for hub in self.hubs:
            if path.startswith((f"/api/{hub.place}/", f"/{hub.prefix}/")):
                hub.answer(request)
                return
        request.plain(404, {})


def main(addresses: Path) -> None:
    store = Server()
    for name in FILES:
        store.add(f"/{name}", Page(Text(b"test")))
    write_json(addresses, {"hub": Hubs(store).url, "files": store.url})
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
