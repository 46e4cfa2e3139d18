"""What each part costs at 1,024, 4,096 and 10,000 ranks, and at 1, 10 and 100 trillion tokens.

    python -m benchmarks scale --work /tmp/scale                  # all parts
    python -m benchmarks scale --work /tmp/scale --only store     # rendezvous, ranks, restore, store, order or records

Measured on this machine, in the shape of the tables in docs/evidence/benchmarks-parallel.md. Nodes have eight ranks.
Ranks that exchange objects are threads of processes of this machine; nothing is extrapolated but the two lines of
records, which are counts.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import benchmark_parser, peak_bytes, show, wall_seconds
from tests.chaos.scale_model import simulate

from zero2all.base.manifest import write_manifest
from zero2all.base.processes import raise_descriptor_limit, watch_parent
from zero2all.base.torch_private import PrefixStore, TCPStore, gloo_group
from zero2all.checkpoint.rank_tree import RankTree
from zero2all.checkpoint.restore import DurableReport, RankReport, SlotReport, decide_restore
from zero2all.checkpoint.training_state import Branch
from zero2all.tokens.sample_order import SampleOrder
from zero2all.tokens.token_store import FORMAT, KIND, TokenStore
from zero2all.track.run_record import MAX_WRITES_PER_SECOND

RANKS = (1024, 4096, 10_000)
RANKS_PER_NODE = 8
TOKENS = (10**12, 10**13, 10**14)
SHARD_TOKENS = 50_000_000  # 200 MB of four bytes
SEQ_LEN, BATCH_SAMPLES = 4096, 4096
SLOTS = 2  # states that a rank keeps in memory
TIMEOUT = timedelta(minutes=5)
Row = tuple[str, list[str]]


def rendezvous(work: Path) -> Iterator[Row]:
    reports = [simulate(-(-ranks // RANKS_PER_NODE), steady=10) for ranks in RANKS]
    yield "nodes meet", [f"{report.meet:.1f} s" for report in reports]
    yield "a lost node is known to all", [f"{report.lost_noticed:.2f} s" for report in reports]
    yield "a silent node is known to all", [f"{report.silent_noticed:.1f} s" for report in reports]
    yield "all have met again after a loss", [f"{report.lost_recovered:.1f} s" for report in reports]
    yield "heartbeats, share of a core of the server", [f"{100 * r.steady_server_cores:.1f}%" for r in reports]
    yield "heartbeats, messages a second", [f"{report.steady_messages_per_second:,.0f}" for report in reports]
    yield "memory of the server", [f"{report.server_memory / 1e6:.0f} MB" for report in reports]


def ranks(work: Path) -> Iterator[Row]:
    """200 bytes from each rank to all."""
    for kind, sizes in (("full mesh", (32, 128)), ("tree", (32, 128, 512))):
        for size in sizes:
            connected, call, sockets = _measure_group(kind, size)
            yield (
                f"{size} ranks exchange objects, {kind}",
                [f"{connected:.1f} s to connect", f"{1e3 * call:.0f} ms a call", f"{sockets} sockets a rank at most"],
            )


def _measure_group(kind: str, size: int) -> tuple[float, float, int]:
    threads = 1 if size <= 128 else RANKS_PER_NODE
    context = multiprocessing.get_context("fork")  # torch is imported once
    store = TCPStore("127.0.0.1", 0, size + 1, True, TIMEOUT, wait_for_workers=False)
    processes, pipes = [], []
    for first in range(0, size, threads):
        receive, send = context.Pipe(duplex=False)
        job = (kind, first, threads, size, store.port, send)
        processes.append(context.Process(target=_rank_process, args=job, daemon=True))
        processes[-1].start()
        send.close()
        pipes.append(receive)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    connected, call, sockets = (max(one[number] for one in found) for number in range(3))
    return connected, call, sockets


def _rank_process(kind: str, first: int, threads: int, size: int, port: int, send: Connection) -> None:
    watch_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = _sockets()
    found: list[tuple[float, float, object]] = [(0.0, 0.0, None)] * threads

    def run(number: int) -> None:
        store = TCPStore("127.0.0.1", port, size + 1, False, TIMEOUT, wait_for_workers=False)
        found[number] = _use_group(kind, store, first + number, size)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sockets = (_sockets() - before) // threads
    send.send((max(one[0] for one in found), max(one[1] for one in found), sockets))
    time.sleep(1)  # a rank that leaves early looks like a failure to the others
    os._exit(0)


def _use_group(kind: str, store: Any, rank: int, size: int, calls: int = 5) -> tuple[float, float, object]:
    """Seconds to connect, and for a call; and what keeps the connections."""
    import torch

    payload, began = bytes(200), time.perf_counter()
    exchange: Callable[[], object]
    if kind == "tree":
        tree = RankTree(PrefixStore("tree", store), rank, size, TIMEOUT)

        def exchange() -> object:
            return tree.broadcast(tree.gather(payload, b"".join))
    else:
        group, mine = gloo_group(PrefixStore("mesh", store), rank, size, TIMEOUT), torch.zeros(200, dtype=torch.uint8)

        def exchange() -> object:
            parts = [torch.empty_like(mine) for _ in range(size)]
            return group.allgather([parts], [mine]).wait()

    exchange()
    connected, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(calls):
        exchange()
    return connected, (time.perf_counter() - began) / calls, exchange


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
        except OSError:
            continue
    return count


def restore(work: Path) -> Iterator[Row]:
    """Every rank reports the slots of its node, and decides by itself."""
    seconds, sizes = [], []
    for world_size in RANKS:
        lineage = (Branch("a" * 12, 0), Branch("b" * 12, 900))
        reports = []
        for rank in range(world_size):
            node = rank // RANKS_PER_NODE
            slots = tuple(
                SlotReport(rank=other, world_size=world_size, step=1000 + number, lineage=lineage, layout="same")
                for other in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
                for number in range(SLOTS)
            )
            reports.append(RankReport(slots, layout="same", node=node))
        durable = [DurableReport(path="step-00000900", step=900, lineage=lineage[:1])]
        began = time.perf_counter()
        decision = decide_restore(reports, durable, lineage)
        seconds.append(time.perf_counter() - began)
        assert decision.chosen is not None, decision
        assert decision.chosen.tier == "memory"
        sizes.append(sum(len(pickle.dumps(report)) for report in reports))
    yield "restore decision on each rank", [f"{1e3 * each:.0f} ms" for each in seconds]
    yield "reports that each rank gets for it", [f"{each / 1e6:.1f} MB" for each in sizes]


def store(work: Path) -> Iterator[Row]:
    """The manifest of a token store names every shard; it is read once by each process."""
    seconds, sizes, memory = [], [], []
    for tokens in TOKENS:
        shards, directory = tokens // SHARD_TOKENS, work / f"store-{tokens}"
        directory.mkdir(parents=True, exist_ok=True)
        source = {
            "documents": shards,
            "tokens": tokens,
            "bytes": 4 * tokens,
            "shards": [f"web/part-{number:07}" for number in range(shards)],
            "shard_tokens": [SHARD_TOKENS] * shards,
            "sha256": [f"{number:064x}" for number in range(shards)],
            "records": [f"{number:064x}" for number in range(shards)],
        }
        body = {"format": FORMAT, "tokenizer": "0", "vocab_size": 131072, "documents_key": "0", "tokens": tokens}
        write_manifest(directory, KIND, {**body, "bytes": 4 * tokens, "splits": {"train": {"web": source}}})
        sizes.append(sum(path.stat().st_size for path in directory.iterdir()))
        del source
        elapsed, peak = _in_child(lambda directory=directory: TokenStore(directory, "train"))  # type: ignore[misc]
        seconds.append(elapsed)
        memory.append(peak)
    yield "shards of 50 M tokens", [f"{tokens // SHARD_TOKENS:,}" for tokens in TOKENS]
    yield "manifest of the token store", [f"{size / 1e6:.0f} MB" for size in sizes]
    yield "opening it, in each process", [f"{each:.1f} s" for each in seconds]
    yield "memory for that, at most", [f"{each / 1e6:.0f} MB" for each in memory]


def order(work: Path) -> Iterator[Row]:
    """The samples of one batch, in the middle of the second epoch."""
    seconds = []
    for tokens in TOKENS:
        found, sequences = SampleOrder({"web": tokens // SEQ_LEN}, seed=1), tokens // SEQ_LEN
        found.locate(0, 10)
        began = time.perf_counter()
        found.locate(sequences + sequences // 2, sequences + sequences // 2 + BATCH_SAMPLES)
        seconds.append(time.perf_counter() - began)
    yield "order of the 4,096 samples of a batch", [f"{1e3 * each:.1f} ms" for each in seconds]


def records(work: Path) -> Iterator[Row]:
    yield (
        "writes of records a second, at steps of 1 s, at most",
        [f"{2 * (1 + min(count - 1, MAX_WRITES_PER_SECOND)):,}" for count in RANKS],
    )
    yield "files of records", [f"{2 * count:,}" for count in RANKS]


def _in_child(function: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the bytes by which the peak of resident memory grew."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        before = peak_bytes()
        elapsed = wall_seconds(function)
        send.send((elapsed, peak_bytes() - before))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    result: tuple[float, int] = receive.recv()
    process.join()
    return result


PARTS = {part.__name__: part for part in (rendezvous, ranks, restore, store, order, records)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", choices=list(PARTS), action="append")
    options = parser.parse_args()
    raise_descriptor_limit()
    for name in options.only or PARTS:
        head = [f"{tokens // 10**12} T tokens" for tokens in TOKENS]
        if name in ("rendezvous", "restore", "records"):
            head = [f"{count:,} ranks" for count in RANKS]
        show("\n| | " + " | ".join(["", "", ""] if name == "ranks" else head) + " |\n|---|---|---|---|")
        for what, values in PARTS[name](options.work):
            show(f"| {what} | " + " | ".join(values) + " |")
