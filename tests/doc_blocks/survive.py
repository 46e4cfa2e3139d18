"""Pages about failures (how-to/survive), watching a run (how-to/watch) and the run record."""

from __future__ import annotations

from tests.doc_pages import Page, Sandbox, prepare_longer_run, prepare_run, prepare_stages


def prepare_nothing(page: Sandbox) -> None:
    """The blocks of the page need no run."""


SURVIVE, WATCH = "docs/how-to/survive", "docs/how-to/watch"
PAGES = [
    Page(
        f"{SURVIVE}/launch.md", prepare_stages,
        {"z2a launch --rendezvous-only --rdzv-listen login:29500":
         "command z2a launch --rendezvous-only --rdzv-listen 127.0.0.1:{port} >rendezvous.log 2>&1 &",
         "--nproc-per-node 8 --nnodes 3:4 --rdzv-endpoint login:29500":
         "--nproc-per-node 1 --nnodes 2 --rdzv-endpoint 127.0.0.1:{port}",
         "--nproc-per-node 8 -- train": "--nproc-per-node 2 -- train"},
    ),
    Page(f"{SURVIVE}/checkpoints.md", prepare_longer_run, {"300 400": "300 336"}),
    Page(f"{SURVIVE}/replicas.md", prepare_nothing),
    Page(f"{SURVIVE}/checkpoint-interval.md", prepare_run, in_clone=True),
    Page(f"{SURVIVE}/hang.md", prepare_stages),
    Page(f"{SURVIVE}/spike.md", prepare_longer_run),
    Page(f"{SURVIVE}/silent-corruption.md", prepare_nothing),
    Page(f"{WATCH}/page.md", prepare_run, {"runs/first": "runs/mine"}, in_clone=True),
    Page(f"{WATCH}/where-time-goes.md", prepare_stages, {"recipes/quickstart.yaml": "my.yaml"}),
    Page(f"{WATCH}/health.md", prepare_run),
    Page(
        f"{WATCH}/ssh.md", prepare_run,
        {"me@": "{user}@", "/home/me/runs/big": "{work}/runs/mine",
         ":2222/~/runs": ":{ssh_port}{work}/runs", "runs/local": "runs/mine", "runs/big": "runs/mine",
         "8080": "{port}"},
    ),
    Page(f"{WATCH}/sinks.md", prepare_stages),
    Page("docs/reference/run-record.md", prepare_nothing),
]  # fmt: skip
NOT_RUN = {
    f"{SURVIVE}/job-security.md": "a rendezvous server for other machines; launch.md runs the same command",
    f"{SURVIVE}/lost-node.md": "several machines; launch.md runs the same command",
    f"{SURVIVE}/stragglers.md": "several machines; tests/chaos has a slow node",
    f"{SURVIVE}/preflight.md": "several machines, and findings of the machine of the test",
    f"{SURVIVE}/failure-reports.md": "a failed job and a hook of the reader; tests/cluster/launch has both",
    f"{SURVIVE}/inject-faults.md": "the suite of faults itself, more than an hour",
    f"{WATCH}/prometheus.md": "a server in the background; tests/track/test_prometheus.py runs the configuration",
}
