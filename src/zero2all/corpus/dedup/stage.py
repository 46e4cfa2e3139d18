"""The deduplication stage: its steps in order, and which of them run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero2all.base.console import progress, warn
from zero2all.base.errors import UsageError
from zero2all.base.io import fingerprint, write_json
from zero2all.base.manifest import read_finished
from zero2all.base.tasks import TaskEngine
from zero2all.corpus.dedup.decontaminate import build_decontamination_index, write_contamination_drops
from zero2all.corpus.dedup.drops import collect_shard_drops
from zero2all.corpus.dedup.exact import KEY_DTYPE, write_exact_drops, write_exact_keys
from zero2all.corpus.dedup.near import (
    band_dtype,
    connect_components,
    labeled_dtype,
    write_labeled_nodes,
    write_near_drops,
    write_near_links,
    write_signatures,
)
from zero2all.corpus.dedup.shuffle import DedupParams
from zero2all.corpus.readers import BrokenRecord, RawFile, UnreadableFileError, list_files, read_records
from zero2all.recipe import CorpusRecipe, SourceRecipe

RunTasks = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]


def run_locally(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """One task after the other, in this process."""
    return [function(*one) for one in arguments]


@dataclass(frozen=True)
class DuplicateCounts:
    shards: list[str]
    compared: int
    """Documents compared for near duplicates."""
    dropped: dict[str, int]
    """Documents by reason."""


def find_duplicates(
    shards: Sequence[Path], work: Path, params: DedupParams, run_tasks: RunTasks = run_locally, *, near: bool = True
) -> tuple[dict[Path, Path], DuplicateCounts]:
    """For every shard a file below ``work/drops`` of dropped documents and those kept for them; and counts.

    The result depends on the documents and the parameters alone: not on the order of shards, the partitions, or what
    runs the tasks.
    """
    shards = sorted(shards, key=lambda path: path.name)
    if len({path.name for path in shards}) < len(shards):
        raise UsageError("two shards have the same name; give each its own, since the output uses their names")
    numbered = list(enumerate(shards))

    def files(step: str, suffix: str = ".npy") -> list[Path]:
        return [work / step / f"{path.name}{suffix}" for path in shards]

    keys, bands, lists = files("exact_keys"), files("bands"), files("drops", "")
    compared = 0

    counts = run_tasks(write_exact_keys, [(shard, number, keys[number], params) for number, shard in numbered])
    partitions = params.partitions_for(sum(counts), KEY_DTYPE.itemsize)
    exact = _part_files(work / "exact", partitions)
    run_tasks(write_exact_drops, [(keys, part, partitions, out) for part, out in enumerate(exact)])
    drop_files = exact
    if near:
        seen = run_tasks(
            write_signatures, [(shard, number, bands[number], params, exact) for number, shard in numbered]
        )
        compared = sum(seen)
        drop_files = [*exact, *find_near_duplicates(bands, compared, work, params, run_tasks)]
    dropped = run_tasks(collect_shard_drops, [(drop_files, number, lists[number]) for number, _ in numbered])
    found = DuplicateCounts([path.name for path in shards], compared, _sum_counts(dropped))
    return dict(zip(shards, lists, strict=True)), found


def find_near_duplicates(
    bands: Sequence[Path], documents: int, work: Path, params: DedupParams, run_tasks: RunTasks
) -> list[Path]:
    """Files of drops from the band rows of that many documents. No task holds more than ``params.task_bytes``."""
    partitions = params.partitions_for(documents * params.bands, band_dtype(params).itemsize)
    edges, nodes = _part_files(work / "edges", partitions), _part_files(work / "nodes", partitions)
    tasks = [(bands, part, partitions, edges[part], nodes[part], params) for part in range(partitions)]
    node_rows = sum(run_tasks(write_near_links, tasks))
    labels = work / "components.npy"
    run_tasks(connect_components, [(edges, labels)])
    partitions = params.partitions_for(node_rows, labeled_dtype(params).itemsize)
    labeled, near = _part_files(work / "labeled", partitions), _part_files(work / "near", partitions)
    run_tasks(write_labeled_nodes, [(nodes, labels, part, partitions, out, params) for part, out in enumerate(labeled)])
    run_tasks(write_near_drops, [(labeled, part, partitions, out, params) for part, out in enumerate(near)])
    return near


def _part_files(directory: Path, partitions: int) -> list[Path]:
    return [directory / f"{part:05}.npy" for part in range(partitions)]


def _sum_counts(counted: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for counts in counted for name in counts)
    return {name: sum(counts[name] for counts in counted) for name in names}


@dataclass(frozen=True)
class DoneMarker:
    """The key in a step's ``done.json``, which is written last. The rest of the file is for people."""

    key: str


@contextmanager
def task_runner(engine: TaskEngine, title: str, tasks: int | None = None) -> Iterator[RunTasks]:
    """Runs tasks under a progress bar, which each of them advances by one."""
    with progress(title, tasks) as advance:
        yield lambda function, arguments: engine.run(function, arguments, lambda task: advance(1))


def find_drops(engine: TaskEngine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, list[Path]]:
    """For each part the files that name its documents to drop. Unchanged parts and options are not processed again."""
    drops = {
        part: [duplicates] for part, duplicates in _duplicate_drop_files(engine, recipe, parts, work / "dedup").items()
    }
    if recipe.decontaminate:
        for part, contaminated in _contamination_drop_files(engine, recipe, parts, work / "decontaminate").items():
            drops[part].append(contaminated)
    return drops


def _duplicate_drop_files(engine: TaskEngine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, Path]:
    order = tuple(source.name for source in recipe.sources)
    key = fingerprint([[part.name for part in parts], order, recipe.dedup.model_dump(mode="json")])
    done = work / "done.json"
    if read_finished(DoneMarker, done, key):
        return {part: work / "drops" / part.name for part in parts}
    done.unlink(missing_ok=True)
    params = DedupParams(source_priority=order, threshold=recipe.dedup.threshold)
    with task_runner(engine, "finding duplicates") as run_tasks:
        drops, counts = find_duplicates(parts, work, params, run_tasks, near=recipe.dedup.near)
    write_json(done, {"key": key, **asdict(counts)})
    return drops


def _contamination_drop_files(
    engine: TaskEngine, recipe: CorpusRecipe, parts: list[Path], work: Path
) -> dict[Path, Path]:
    names = [Path(path).name for path in recipe.decontaminate]
    sets = {
        name if names.count(name) == 1 else path: path for name, path in zip(names, recipe.decontaminate, strict=True)
    }
    build_decontamination_index({name: _evaluation_texts(path) for name, path in sets.items()}, work / "index")
    limits = (recipe.contamination.min_hits, recipe.contamination.min_share)
    drops = {part: work / "drops" / part.name for part in parts}
    tasks = [(part, work / "index", out, *limits) for part, out in drops.items()]
    with task_runner(engine, "finding evaluation text", len(tasks)) as run_tasks:
        run_tasks(write_contamination_drops, tasks)
    return drops


def evaluation_files(path: str) -> list[RawFile]:
    """Links are followed: nothing of these files is published."""
    return list_files(SourceRecipe(name="evaluation", paths=[path], follow_links=True))


def _evaluation_texts(path: str) -> Iterator[str]:
    """Every string of every record of an evaluation set: questions, choices and answers."""
    for file in evaluation_files(path):
        try:
            for record in read_records(file):
                if not isinstance(record, BrokenRecord):
                    yield from _strings(dict(record))
        except UnreadableFileError as reason:
            warn(f"documents that contain text of {file.name} are kept, because it cannot be read: {reason}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
