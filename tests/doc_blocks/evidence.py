"""Pages of evidence and troubleshooting whose blocks run as printed, and why the others do not."""

from __future__ import annotations

from tests.doc_pages import Page, prepare_stages

PAGES = [
    Page("docs/how-to/troubleshooting/data-and-tokenizer.md", prepare_stages),
    Page("docs/evidence/benchmarks.md", prepare_stages, in_clone=True),
]
FAILED_RUN = "needs the failure that the page is about"
MEASUREMENT = "takes minutes to hours, on a machine of its own"
NOT_RUN = {
    **{
        f"docs/how-to/troubleshooting/{name}.md": FAILED_RUN
        for name in ("index", "memory", "loss", "hang", "speed", "network", "disk-and-checkpoints")
    },
    **{
        f"docs/evidence/benchmarks-{name}.md": MEASUREMENT
        for name in ("data", "model", "training", "parallel", "resilience")
    },
    "docs/evidence/parity.md": MEASUREMENT,
    "docs/evidence/faults.md": MEASUREMENT,
    "docs/evidence/status.md": "needs GPUs, or a virtual environment with the CUDA build of torch",
    "docs/how-to/troubleshooting/platform.md": "shows which build of torch is installed",
}
