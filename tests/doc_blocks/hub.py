"""A Hub with several repositories and a web server for the pages that download: ``python -m tests.doc_blocks.hub FILE``.

Their addresses are written to FILE. They run until the process is stopped.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.corpus.download_server import FakeHub, Page, Server, Text, _Request
from zero2all.base.io import write_json

TEXT = "".join(json.dumps({"id": str(number), "title": "t", "text": f"Line {number} of a page.\n" * 9}) + "\n" for number in range(40))
QUESTIONS = "".join(
    json.dumps({"INSTRUCTION": f"第{number}个问题是什么？", "RESPONSE": f"第{number}个回答，由很多个不同的字组成。" * 5, "SOURCE": "知乎"}) + "\n"
    for number in range(40)
)  # fmt: skip
REPOSITORIES = {
    "datasets/Salesforce/wikitext": {"wikitext-2-v1/train.jsonl": TEXT, "wikitext-103-v1/train.jsonl": TEXT},
    "datasets/wangrui6/Zhihu-KOL": {"data/train.jsonl": QUESTIONS},
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

    def answer(self, request: _Request) -> None:
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
