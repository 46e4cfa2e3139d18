"""``z2a bench loader``: how fast batches are read, against what training needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from zero2all.base.console import progress
from zero2all.base.machine.devices import pick_device, synchronize
from zero2all.bench.measurements import Measurement, MeasurementReport, this_machine
from zero2all.parallel.mesh import split_batch
from zero2all.recipe import Recipe
from zero2all.tokens import TokenStore
from zero2all.train.data_loader import BatchCopier, DataLoader, read_batch
from zero2all.train.plan import Plan
from zero2all.train.run import require_data

READERS = (1, 2, 4)  # threads that read at once: ranks of one machine share its disk and memory


def bench_loader(recipe: Recipe, batches: int = 50, rounds: int = 3) -> MeasurementReport:
    """Tokens per second of reading alone, by several readers at once, and of the loader that training uses."""
    require_data(recipe)
    store = TokenStore(recipe.tokens_dir, "train")
    plan, masked = (Plan(_with_mask(recipe, document_mask=on), store) for on in (False, True))
    count = min(batches, plan.total_steps)
    tokens = sum(_step_tokens(plan, step) for step in range(count))
    device = pick_device(recipe.train.device)
    sides: dict[str, Callable[[], None]] = {f"read, readers {n}": partial(_read, plan, count, n) for n in READERS}
    sides["loader"] = partial(_iterate, plan, count, None, device)
    copier = BatchCopier(device, _micro_batch_rows)
    sides["loader, copied to the device"] = partial(_iterate, plan, count, copier, device)
    sides["loader, copied to the device, with document starts"] = partial(_iterate, masked, count, copier, device)
    if device.type == "cuda":
        sides["copy from pageable memory"] = partial(_copy, plan, count, device, pinned=False)
        sides["copy from pinned memory"] = partial(_copy, plan, count, device, pinned=True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with progress("loader", rounds * len(sides)) as advance:
        for _ in range(rounds):
            for name, run in sides.items():
                begin = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - begin)
                advance(1)
    rows = [Measurement(name, tokens / min(took), "tokens/s") for name, took in seconds.items()]
    stage = plan.stages[0].recipe
    title = f"{count} batches of {stage.batch_tokens:,} tokens in rows of {stage.seq_len}, fastest of {rounds} rounds"
    return MeasurementReport("loader", title, this_machine(), rows)


def _with_mask(recipe: Recipe, *, document_mask: bool) -> Recipe:
    train = recipe.train.model_copy(update={"document_mask": document_mask})
    return recipe.model_copy(update={"train": train})


def _step_tokens(plan: Plan, step: int) -> int:
    stage = plan.stage_of(step)
    start, stop = stage.sample_range(step)
    return (stop - start) * stage.recipe.seq_len


def _read(plan: Plan, count: int, readers: int) -> None:
    """``readers`` threads read the rows of ``readers`` ranks; together they read every batch once."""
    with ThreadPoolExecutor(readers) as pool:
        for job in [pool.submit(_read_rank, plan, count, rank, readers) for rank in range(readers)]:
            job.result()


def _read_rank(plan: Plan, count: int, rank: int, ranks: int) -> None:
    for step in range(count):
        read_batch(plan, step, rank, ranks)


def _iterate(plan: Plan, count: int, copier: BatchCopier | None, device: torch.device) -> None:
    last = range(count, plan.total_steps)  # the loader reads ahead, but not beyond what is counted
    with DataLoader(plan, 0, copier=copier, skipped_steps=last) as loader:
        for batch in loader:
            if batch.on_device is not None:
                batch.on_device.wait()
    synchronize(device)


def _copy(plan: Plan, count: int, device: torch.device, *, pinned: bool) -> None:
    batch = read_batch(plan, 0)
    inputs = batch.inputs.pin_memory() if pinned else batch.inputs
    for _ in range(count):
        replace(batch, inputs=inputs.to(device, non_blocking=pinned))
    synchronize(device)


def _micro_batch_rows(rows: int, micro_batch_size: int | None) -> int:
    return split_batch(rows, 1, micro_batch_size).samples
