"""``z2a report``: the live page with its data inside, as one file that needs no server and no network."""

from __future__ import annotations

import json
import math
from typing import Any

from zero2all.track.server import PAGE, encode, series, summary
from zero2all.track.terminal import judged
from zero2all.track.watched import WatchedRun

POINTS = 1500
TEXTS = 20  # of each sample and histogram, the newest


def report_html(runs: list[WatchedRun]) -> str:
    summaries, texts = [], []
    for number, run in enumerate(runs):
        kept = summary(run, judged(run))
        for kind in ("sample", "histogram"):
            kept[f"{kind}s"] = {name: steps[-TEXTS:] for name, steps in kept[f"{kind}s"].items()}
            texts += [
                {"run": number, "kind": kind, "name": name, "step": step, "line": run.text(kind, name, step)}
                for name, steps in kept[f"{kind}s"].items()
                for step in steps
            ]
        summaries.append({"id": number, **kept})
    return _page(
        {
            "runs": summaries,
            "series": [series(run, run.names, -math.inf, math.inf, POINTS) for run in runs],
            "texts": texts,
            "facts": [{"recipe": run.facts.recipe, "environment": run.facts.environment} for run in runs],
        }
    )


def _page(data: dict[str, Any]) -> str:
    # Inside a script element only "</" and "<!" mean anything; with "<" escaped, text stays text.
    inside = encode(json.loads(encode(data))).replace("<", "\\u003c")
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style, script = ((PAGE / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    page = page.replace('<link rel="stylesheet" href="assets/app.css">', f"<style>{style}</style>")
    embedded = f'<script type="application/json" id="data">{inside}</script>\n<script>{script}</script>'
    return page.replace('<script src="assets/app.js"></script>', embedded)
