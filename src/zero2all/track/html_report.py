"""``z2a watch --html``: the live page with its data inside, as one self-contained file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from zero2all.track.experiment_record import find_experiments
from zero2all.track.page_data import PAGE_DIR, build_series, encode_json, summarize_run
from zero2all.track.record_lines import LoggedLine
from zero2all.track.run_view import RunView, run_checks
from zero2all.track.terminal import safe_check_health

MAX_POINTS = 1500
MAX_LOGGED_TEXTS = 20  # per sample and histogram, the newest


def report_html(runs: list[RunView]) -> str:
    summaries, texts = [], []
    for number, run in enumerate(runs):
        summary = summarize_run(run, safe_check_health(run))
        summary = replace(summary, samples=_newest(summary.samples), histograms=_newest(summary.histograms))
        logged = [LoggedLine("sample", name, step) for name, steps in summary.samples.items() for step in steps]
        logged += [LoggedLine("histogram", name, step) for name, steps in summary.histograms.items() for step in steps]
        texts += [{"run": number, **vars(line), "line": run.logged_line(line)} for line in logged]
        summaries.append({"id": number, **vars(summary)})
    return _render_page(
        {
            "runs": summaries,
            "experiments": find_experiments([run.location for run in runs]),
            "series": [build_series(run, run.names, -math.inf, math.inf, MAX_POINTS) for run in runs],
            "texts": texts,
            "plans": [_plan(run) for run in runs],
            "facts": [{"recipe": run.metadata.recipe, "environment": run.metadata.environment} for run in runs],
        }
    )


def _plan(run: RunView) -> dict[str, object] | None:
    """What was planned of a run beside what it measured, if both exist."""
    plan, checks = run.metadata.plan, run_checks(run)
    return {"hardware": plan.hardware, "ranks": plan.ranks, "checks": checks} if plan and checks else None


def _newest(steps_by_name: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: steps[-MAX_LOGGED_TEXTS:] for name, steps in steps_by_name.items()}


def _render_page(data: object) -> str:
    # Inside a script element only "</" and "<!" are markup: escape "<".
    inside = encode_json(json.loads(encode_json(data))).replace("<", "\\u003c")
    page = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    style, script = ((PAGE_DIR / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    page = page.replace('<link rel="stylesheet" href="assets/app.css">', f"<style>{style}</style>")
    embedded = f'<script type="application/json" id="data">{inside}</script>\n<script>{script}</script>'
    return page.replace('<script src="assets/app.js"></script>', embedded)
