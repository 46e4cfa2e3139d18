"""A corpus filter of your own, used in a corpus build.

    python examples/custom_filter.py --out runs/examples/filter

The build runs in this process. With ``--workers 2`` it runs in worker processes, which import this script again, so
the filter must be registered at the top level of the script, and the build must be under ``if __name__ == "__main__"``.
``z2a corpus build`` and Ray do not import your module: for them the filter has to be a file in
``src/zero2all/corpus/filters/``.

A rerun reuses what was built with the same filter names and options. If you change the code of a filter, remove
``documents`` and ``documents.work``.

``zero2all.corpus.filters`` and ``zero2all.base.tasks`` are not in the Python API reference; they may change.
"""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq

from tiny_run import argument_parser
from zero2all.base.plugins import register
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import Document, build_corpus
from zero2all.corpus.filters import KEEP, Change, Drop, FilterResult
from zero2all.recipe import CorpusRecipe, SourceRecipe

URL = re.compile(r"https?://\S+")
PAGES = {
    "harbour": "The old harbour has been repaired. Boats with blue sails leave every morning at eight.",
    "timetable": "Trains to the coast leave hourly, see https://example.org/trains for the whole timetable.",
    "links": "More: https://example.org/a https://example.org/b https://example.org/c https://example.org/d",
    "stub": "Under construction.",
    "recipe": "Boil the potatoes for twenty minutes, then mash them with butter, milk and a little nutmeg.",
}


@register("filter", "links")
def links(document: Document, *, max_share: float = 0.3) -> FilterResult:
    """Drop a document if more than a share of its characters are URLs; mask the URLs of any other."""
    urls = URL.findall(document.content)
    if sum(map(len, urls)) > max_share * len(document.content):
        return Drop("mostly links")
    return Change(URL.sub("[URL]", document.content), "URLs masked") if urls else KEEP


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    raw, documents = arguments.out / "raw", arguments.out / "documents"
    raw.mkdir()
    for title, text in PAGES.items():
        (raw / f"{title}.jsonl").write_text(json.dumps({"title": title, "text": text}), encoding="utf-8")

    corpus = CorpusRecipe(
        sources=[SourceRecipe(name="web", paths=[str(raw)])],
        filters=[{"name": "too_short", "min_chars": 40}, {"name": "links", "max_share": 0.5}],
        holdout=0,
    )
    built = build_corpus(corpus, documents, TaskEngine(workers=arguments.workers))

    for shard in built.splits["train"]["web"].shards:
        for row in pq.read_table(documents / "train" / shard).to_pylist():
            print(f"kept     {row['title']:<10} {row['content']}")
    web = built.sources["web"]
    for reason, dropped in web.dropped.items():
        for sample in dropped.samples:  # the first few of each reason
            print(f"dropped  {sample.title:<10} {reason}")
    print(f"{web.read.documents} documents read, {built.documents} kept; changed by filters: {web.changed}")


if __name__ == "__main__":
    main()
