"""``/metrics`` of a server, in Prometheus' text format."""

from __future__ import annotations

from zero2all.serve.engine import Engine

QUANTILES = (0.5, 0.9, 0.99)


def metrics_text(engine: Engine) -> str:
    stats = engine.stats
    families = [
        ("requests_total", "counter", "Requests.", stats.requests),
        ("requests_completed_total", "counter", "Requests that were answered.", stats.completed),
        (
            "requests_cancelled_total",
            "counter",
            "Requests whose client went away, or that took too long.",
            stats.cancelled,
        ),
        ("requests_failed_total", "counter", "Requests that failed in the model.", stats.failed),
        ("requests_refused_total", "counter", "Requests refused because the queue was full.", stats.refused),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", stats.prompt_tokens),
        ("generated_tokens_total", "counter", "Tokens of complete answers.", stats.generated_tokens),
        ("steps_total", "counter", "Forward passes.", stats.steps),
        ("busy_seconds_total", "counter", "Time in forward passes.", stats.busy_seconds),
        ("slots", "gauge", "Requests that are generated at the same time, at most.", engine.rows),
        ("slots_used", "gauge", "Requests that are being generated.", engine.active),
        ("requests_waiting", "gauge", "Requests in the queue.", max(0, engine.waiting)),
    ]
    lines = []
    for name, kind, help_text, value in families:
        full = f"zero2all_serve_{name}"
        lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    times = sorted(stats.first_token_seconds)
    name = "zero2all_serve_first_token_seconds"
    lines += [f"# HELP {name} Time to the first token, of the newest requests.", f"# TYPE {name} gauge"]
    for quantile in QUANTILES if times else ():
        value = times[min(len(times) - 1, int(quantile * len(times)))]
        lines.append(f'{name}{{quantile="{quantile}"}} {value:.6f}')
    return "\n".join(lines) + "\n"
