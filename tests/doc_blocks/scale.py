"""Pages about planning, parallelism and several nodes: how their blocks run."""

from __future__ import annotations

from tests.doc_pages import Page, prepare_run, prepare_stages

NOT_RUN: dict[str, str] = {
    "docs/how-to/scale/find-a-layout.md": "trial runs of many minutes; tests/experiments/test_tune.py",
    "docs/how-to/scale/scaling-ladder.md": "trains a family of models; tests/experiments/test_ladder.py",
    "docs/how-to/scale/parallelism.md": "its Python block is part of a training script; tests/parallel",
    "docs/how-to/scale/kernels.md": "measurements of many minutes; tests/bench",
    "docs/how-to/scale/firewalls.md": "needs port maps between machines; tests/cluster/launch/test_nat.py",
    "docs/how-to/scale/overlay.md": "needs root and WireGuard; tests/cluster/launch/test_nat.py",
    "docs/how-to/scale/diloco.md": "needs three machines at once; tests/train/diloco/test_island_stories.py",
}
PAGES = [
    Page("docs/how-to/scale/plan.md", prepare_stages, in_clone=True),
    Page("docs/how-to/scale/trace-and-measure.md", prepare_run),
    Page("docs/how-to/scale/fit-memory.md", prepare_stages),
    Page(
        "docs/how-to/scale/fsdp.md", prepare_stages,
        {"--nproc-per-node 8": "--nproc-per-node 2", "parallel.dp_replicate=8": "parallel.dp_replicate=2",
         "parallel.dp_shard=4": "parallel.dp_shard=1"},
    ),
    Page(
        "docs/how-to/scale/tensor-and-context.md", prepare_stages,
        {"--nproc-per-node 8": "--nproc-per-node 2", "parallel.tp=4": "parallel.tp=2",
         "parallel.cp=4 train.seq_len=8192": "parallel.cp=2"},
    ),
    Page(
        "docs/how-to/scale/pipeline-and-experts.md", prepare_stages,
        {"--nproc-per-node 8": "--nproc-per-node 2", "parallel.schedule=interleaved": "parallel.schedule=1f1b"},
        in_clone=True,
    ),
    Page(
        "docs/how-to/scale/multi-node.md", prepare_run,
        {"me@": "{user}@", "/shared/runs/big": "{work}/runs/mine", "login:29500": "127.0.0.1:{port}",
         "--nproc-per-node 8 --nnodes 4 --rdzv": "--nproc-per-node 1 --nnodes 2 --rdzv"},
    ),
    Page("docs/how-to/scale/slurm.md", prepare_stages),
    Page("docs/how-to/scale/kubernetes.md", prepare_stages),
    Page(
        "docs/how-to/scale/any-script.md", prepare_stages,
        {"login:29500": "127.0.0.1:{port}",
         "--nproc-per-node 8 --nnodes 4 --rdzv": "--nproc-per-node 1 --nnodes 2 --rdzv",
         "--nproc-per-node 8 --max-restarts": "--nproc-per-node 2 --max-restarts"},
    ),
    Page("docs/how-to/scale/numa.md", prepare_stages, {"--nproc-per-node 8": "--nproc-per-node 2"}),
    Page("docs/how-to/scale/slow-networks.md", prepare_run, {"runs/first": "runs/mine"}),
]  # fmt: skip
