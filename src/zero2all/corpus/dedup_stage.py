"""The deduplication stage: boilerplate lines, duplicate documents, and text of evaluation sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero2all.console import progress, warn
from zero2all.corpus.dedup.boilerplate import BoilerplateParams, count_lines, strip_boilerplate, write_boilerplate_lines
from zero2all.corpus.dedup.components import RunTasks
from zero2all.corpus.dedup.decontaminate import build_decontamination_index, write_contamination_drops
from zero2all.corpus.dedup.duplicates import find_duplicates
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.readers import BrokenRecord, RawFile, UnreadableFileError, list_files, read_records
from zero2all.engine import Engine
from zero2all.io import fingerprint, read_finished, write_json
from zero2all.recipe import CorpusRecipe, SourceRecipe


@dataclass(frozen=True)
class FinishedStep:
    """What counts of a step's ``done.json``, written last; the rest of it is for people."""

    key: str


@contextmanager
def task_runner(engine: Engine, title: str, tasks: int | None = None) -> Iterator[RunTasks]:
    """Runs tasks under a progress bar, which each of them advances by one."""
    with progress(title, tasks) as advance:
        yield lambda function, arguments: engine.run(function, arguments, lambda task: advance(1))


def find_drops(engine: Engine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, list[Path]]:
    """For each part the files that name its documents to drop. Unchanged parts and options are not processed again."""
    drops = {
        part: [duplicates] for part, duplicates in _duplicate_drop_files(engine, recipe, parts, work / "dedup").items()
    }
    if recipe.decontaminate:
        for part, contaminated in _contamination_drop_files(engine, recipe, parts, work / "decontaminate").items():
            drops[part].append(contaminated)
    return drops


def remove_boilerplate(engine: Engine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, Path]:
    """For each part the file to continue with: itself, or a copy without boilerplate lines."""
    if not recipe.dedup.boilerplate or not parts:
        return {part: part for part in parts}
    stripped = {part: work / "stripped" / part.name for part in parts}
    key = fingerprint([part.name for part in parts])
    done = work / "stripped" / "done.json"
    if read_finished(FinishedStep, done, key):
        return stripped
    done.unlink(missing_ok=True)
    lines, partitions = BoilerplateParams(), DedupParams().partitions
    counted = [work / "lines" / f"{part.name}.npy" for part in parts]
    shared = [work / "lines" / f"{number:05}.npy" for number in range(partitions)]
    with task_runner(engine, "finding boilerplate lines", 2 * len(parts) + len(shared)) as run_tasks:
        documents: Counter[str] = Counter()
        tasks = [(part, out, lines) for part, out in zip(parts, counted, strict=True)]
        for of_part in run_tasks(count_lines, tasks):
            documents.update(of_part)
        run_tasks(
            write_boilerplate_lines,
            [(counted, n, partitions, dict(documents), out, lines) for n, out in enumerate(shared)],
        )
        counts = run_tasks(strip_boilerplate, [(part, shared, out, lines) for part, out in stripped.items()])
    write_json(done, {"key": key, "lines": sum(of_part["lines"] for of_part in counts)})
    return stripped


def _duplicate_drop_files(engine: Engine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, Path]:
    order = tuple(source.name for source in recipe.sources)
    key = fingerprint([[part.name for part in parts], order, recipe.dedup.model_dump(mode="json")])
    done = work / "done.json"
    if read_finished(FinishedStep, done, key):
        return {part: work / "drops" / part.name for part in parts}
    done.unlink(missing_ok=True)
    params = DedupParams(source_priority=order, threshold=recipe.dedup.threshold)
    with task_runner(engine, "finding duplicates") as run_tasks:
        drops, counts = find_duplicates(parts, work, params, run_tasks, near=recipe.dedup.near)
    write_json(done, {"key": key, **asdict(counts)})
    return drops


def _contamination_drop_files(engine: Engine, recipe: CorpusRecipe, parts: list[Path], work: Path) -> dict[Path, Path]:
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
