"""How the blocks of the pages in docs/explain run."""

from __future__ import annotations

from tests.doc_pages import Page, Sandbox, prepare_run


def prepare_script(page: Sandbox) -> None:
    (page.work / "my_script.py").write_text("print('trained')\n", encoding="utf-8")


def prepare_nothing(page: Sandbox) -> None:
    """Plans, and Python that needs no files."""


FINISHED_RUN = {"runs/first": "runs/mine"}
PAGES = [
    Page("docs/explain/bits-per-byte.md", prepare_run, FINISHED_RUN),
    Page("docs/explain/checkpoint-interval.md", prepare_nothing),
    Page("docs/explain/memory-anatomy.md", prepare_nothing),
    Page("docs/explain/packing.md", prepare_nothing),
    Page("docs/explain/parity.md", prepare_nothing, {'"FSDP 2, always reshard"': '"FSDP 2, always reshard" --steps 2'}),
    Page("docs/explain/pipelines.md", prepare_nothing),
    Page("docs/explain/sample-order.md", prepare_nothing),
    Page("docs/explain/story-world.md", prepare_nothing, {"--out runs/first": "--out runs/first train.steps=20"}),
    Page("docs/explain/threat-model.md", prepare_run, FINISHED_RUN),
    Page("docs/explain/three-walls.md", prepare_nothing),
    Page("docs/explain/torchrun.md", prepare_script, {"--nproc-per-node 8": "--nproc-per-node 2"}),
    Page("docs/explain/zero.md", prepare_nothing),
]
NOT_RUN: dict[str, str] = {}
