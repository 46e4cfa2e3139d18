"""``z2a corpus build``: raw files to published documents.

Three stages of tasks over paths, run by any engine: parts (read and clean, a file a task), duplicates (hash-partitioned
shuffles through files), shards (split and publish). Intermediate files are in ``<out>.work``; a rerun redoes only
what changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zero2all.base.console import progress, warn
from zero2all.base.directory_lock import lock_output
from zero2all.base.errors import UsageError, Z2aError
from zero2all.base.io import MANIFEST, atomic_dir, fingerprint, read_json, require_replaceable
from zero2all.base.manifest import all_files, is_current, write_manifest
from zero2all.base.paths import is_url
from zero2all.base.plugins import bind
from zero2all.base.records import parse_record
from zero2all.base.tasks import TaskEngine, available_cores
from zero2all.base.units import show_bytes
from zero2all.corpus.dedup.stage import evaluation_files, find_drops, task_runner
from zero2all.corpus.document_shards import WrittenShards, group_parts_by_size, write_shards
from zero2all.corpus.filters import DEFAULT_CHAT_FILTERS, DEFAULT_FILTERS, build_filters
from zero2all.corpus.filters.quality_classifier import filter_checksums
from zero2all.corpus.manifest import (
    SPLITS,
    BuiltCorpus,
    CorpusManifest,
    DroppedDocuments,
    ReadCounts,
    SkippedBySource,
    SkippedFiles,
    SourceCounts,
    SplitShards,
    count_text,
    reasons_text,
)
from zero2all.corpus.mapping import resolve_mapping
from zero2all.corpus.part_files import PartFile, PartRecord, PartTask, group_small_files, part_path, write_part
from zero2all.corpus.readers import LINK_OUTSIDE_SOURCE, MISSING_REASONS, list_files, missing_packages, split_large_file
from zero2all.corpus.validation_split import LONG_CHARACTERS, split_parts
from zero2all.recipe import CorpusRecipe, SourceRecipe
from zero2all.recipe.source_names import source_file_names

KIND = "documents"
FORMAT = 6  # raised when the same inputs and options give other documents than before
MAX_QUARANTINED_PER_SOURCE = 100  # of broken records, per source, in the manifest
MAX_DROPPED_EXAMPLES_PER_SOURCE = 5  # of dropped documents, per source and reason, in the manifest
WORKER_KILLED = "killed its worker process twice"
MIN_PARALLEL_BYTES = 8_000_000  # one process reads and cleans them before other workers would have started


def build_corpus(
    recipe: CorpusRecipe,
    out: Path,
    engine: TaskEngine | None = None,
    before_replace: Callable[[], None] = lambda: None,
    *,
    verify: bool = False,
) -> BuiltCorpus:
    """Read, clean, deduplicate and split every source into ``out``; return its manifest.

    ``before_replace`` is called before other documents in ``out`` are replaced, and may raise. With ``verify`` every
    byte of finished output is compared with its checksum, not only samples.
    """
    with lock_output(out, "corpus build"):
        return _build_corpus(recipe, out, engine or TaskEngine(), before_replace, verify=verify)


def _build_corpus(
    recipe: CorpusRecipe, out: Path, engine: TaskEngine, before_replace: Callable[[], None], *, verify: bool
) -> BuiltCorpus:
    if not recipe.sources:
        raise UsageError("the recipe names no text: add corpus.sources, each with a name and paths")
    specs = list(DEFAULT_FILTERS) if recipe.filters is None else recipe.filters
    models = filter_checksums(build_filters(specs))  # fail on a wrong name before hours of reading
    for source in recipe.sources:
        resolve_mapping(source)
    tasks = _plan_parts(recipe, models)
    _warn_about_links(tasks)
    evaluation = [file.fingerprint for path in recipe.decontaminate for file in evaluation_files(path)]
    options = recipe.model_dump(
        mode="json", include={"dedup", "decontaminate", "contamination", "holdout", "shard_size"}
    )
    key = fingerprint([[task.key for task in tasks], options, evaluation])
    missing = missing_packages()
    key_with_missing = fingerprint([key, missing])  # of a corpus without the files that need them
    if any(is_current(out, KIND, one, verify=verify) for one in (key, key_with_missing)):
        return parse_record(BuiltCorpus, {**read_json(out / MANIFEST), "reused": True}, out / MANIFEST)

    require_replaceable(out, KIND)  # like the filters: before hours of reading
    work = out.with_name(out.name + ".work")
    if missing:  # parts of the same files have more in them once packages are installed
        tasks = [replace(task, key=fingerprint([task.key, missing])) for task in tasks]
    parts = _write_parts(engine, recipe, tasks, work / "parts")
    _remove_stale_parts(work / "parts", parts)
    if not MISSING_REASONS.isdisjoint(reason for part in parts for reason in (*part.unreadable, *part.left_out)):
        key = key_with_missing
    if any(WORKER_KILLED in part.unreadable for part in parts):  # tried again by the next build
        key = fingerprint([key, WORKER_KILLED])
    nonempty = [PartFile(part, part_path(work / "parts", part.source, part.key)) for part in parts if part.documents]
    if not nonempty:
        raise Z2aError(_nothing_left_message(recipe, parts))
    drops = find_drops(engine, recipe, [part.path for part in nonempty], work)
    clean = [replace(part, drop_files=drops[part.path]) for part in nonempty]
    ready = split_parts(engine, recipe, clean, work, key)
    files_before = read_json(out / MANIFEST).get("files") if (out / MANIFEST).exists() else None
    with atomic_dir(out, KIND) as partial:
        written = _write_shards(engine, recipe, ready, partial)
        manifest = _build_manifest(recipe, key, parts, written, specs)
        write_manifest(partial, KIND, asdict(manifest))
        if files_before not in (None, manifest.files):
            before_replace()
    _warn_about_empty_splits(recipe, manifest, out)
    return BuiltCorpus(**vars(manifest), reused=False)


def _nothing_left_message(recipe: CorpusRecipe, parts: list[PartRecord]) -> str:
    skipped = _skipped_by_source(recipe, parts)
    whys = [f"{name}: {_reasons(name, of_source, parts)}" for name, of_source in skipped.items()]
    files = sum(part.files for part in parts)
    return f"no document is left of {count_text(files, 'file')}; {'; '.join(whys)}"


def _reasons(source: str, skipped: SkippedBySource, parts: list[PartRecord]) -> str:
    mine = [part.dropped for part in parts if part.source == source]
    dropped = _sum_counts({reason: of_reason.documents for reason, of_reason in part.items()} for part in mine)
    return reasons_text(skipped, dropped) or "it has no files"


def _warn_about_links(tasks: list[PartTask]) -> None:
    """Before hours of reading: a folder of links, such as a Hugging Face cache, gives nothing without the option."""
    outside = (task.source.name for task in tasks for file in task.files if file.skip_reason == LINK_OUTSIDE_SOURCE)
    for name, links in Counter(outside).items():
        warn(
            f"corpus source {name!r}: {links} link{'s' * (links > 1)} out of the source will not be read; "
            "if you trust the data, set follow_links: true on the source"
        )


def _warn_about_empty_splits(recipe: CorpusRecipe, manifest: CorpusManifest, out: Path) -> None:
    train, valid = manifest.splits["train"], manifest.splits["valid"]
    more = f"give more documents, or join short ones into a file of {LONG_CHARACTERS:,} characters or more"
    for name, of_source in train.items():
        if not of_source.documents and valid[name].documents:
            warn(f"corpus source {name!r} has validation text but no training text; {more}, or lower corpus.holdout")
        elif not of_source.documents:
            dropped = {reason: part.documents for reason, part in manifest.sources[name].dropped.items()}
            why = reasons_text(manifest.left_out[name], dropped) or "it has no files"
            warn(f"corpus source {name!r} gave no documents ({why}); see left_out in {out}/manifest.json")
    if recipe.holdout and not any(of_source.documents for of_source in valid.values()):
        warn(f"there is no validation text: no document happens to be in that split; {more}, or raise corpus.holdout")


def recommended_workers(recipe: CorpusRecipe) -> int:
    """The number of local worker processes that pays off for a build."""
    if any(is_url(path) for source in recipe.sources for path in source.paths):
        return available_cores()
    size = sum(file.bytes for source in recipe.sources for file in list_files(source))
    return available_cores() if size >= MIN_PARALLEL_BYTES else 1


def _filters_of(recipe: CorpusRecipe, source: SourceRecipe) -> list[Any]:
    if recipe.filters is not None:
        return recipe.filters
    return list(DEFAULT_FILTERS if source.kind == "text" else DEFAULT_CHAT_FILTERS)


def _plan_parts(recipe: CorpusRecipe, models: Any) -> list[PartTask]:
    """One part per file, per range of a large one or per group of small ones. Its key: the files as they are, how they
    are read, how they are cleaned.

    The path of a file is not part of the key, unless two parts are of files with the same names, sizes and times.
    """
    tasks = []
    for source in recipe.sources:
        kind = {"kind"} if source.kind != "text" else set()  # absent as before, so that older parts stay valid
        version = [] if source.reader is None else [source.reader, bind("reader", source.reader).source]
        reading = source.model_dump(mode="json", include={"name", "category", "fields", "mapping", "exclude"} | kind)
        cleaning = [_filters_of(recipe, source), models]
        share = source.take if isinstance(source.take, float) else None
        ranges = (
            file
            for whole in list_files(source)
            for file in (split_large_file(whole) if source.reader is None else [whole])
        )
        for files in group_small_files(ranges):
            contents = [[file.name, file.fingerprint] for file in files]
            tasks.append(PartTask(source, files, fingerprint([FORMAT, reading, share, contents, cleaning, *version])))
    seen = Counter(task.key for task in tasks)
    return [
        task if seen[task.key] == 1 else replace(task, key=fingerprint([task.key, [file.path for file in task.files]]))
        for task in tasks
    ]


def _write_parts(engine: TaskEngine, recipe: CorpusRecipe, tasks: list[PartTask], directory: Path) -> list[PartRecord]:
    total = sum(task.bytes for task in tasks)
    # Large files first, so that the last task to end is a short one.
    by_size = sorted(tasks, key=lambda task: -task.bytes)
    with progress(f"reading {show_bytes(total)}", total) as advance:
        parts = engine.run(
            write_part,
            [(task, _filters_of(recipe, task.source), directory) for task in by_size],
            lambda number: advance(by_size[number].bytes),
            _without_files,
        )
    by_key = {task.key: part for task, part in zip(by_size, parts, strict=True)}
    return [by_key[task.key] for task in tasks]


def _without_files(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    task: PartTask = arguments[0]
    return (task.without_files(WORKER_KILLED), *arguments[1:])


def _remove_stale_parts(directory: Path, parts: list[PartRecord]) -> None:
    """Remove parts of files that no longer exist or were read with other options."""
    paths = [part_path(directory, part.source, part.key) for part in parts]
    wanted = {*paths, *(path.with_suffix(".json") for path in paths)}
    for path in all_files(directory):
        if path not in wanted:
            path.unlink()


def _write_shards(engine: TaskEngine, recipe: CorpusRecipe, parts: list[PartFile], out: Path) -> list[WrittenShards]:
    for split in SPLITS:
        (out / split).mkdir()
    tasks = []
    for source, file_name in source_file_names(source.name for source in recipe.sources).items():
        mine = [part for part in parts if part.record.source == source]
        for number, group in enumerate(group_parts_by_size(mine, recipe.shard_size)):
            files = [(part.path, part.drop_files) for part in group]
            tasks.append((source, f"{file_name}-{number:05}", files, out, recipe.shard_size, recipe.holdout))
    with task_runner(engine, "writing shards", len(tasks)) as run_tasks:
        return run_tasks(write_shards, tasks)


def _build_manifest(
    recipe: CorpusRecipe, key: str, parts: list[PartRecord], written: list[WrittenShards], specs: list[Any]
) -> CorpusManifest:
    splits = _split_summaries(recipe, written)
    return CorpusManifest(
        key=key,
        format=FORMAT,
        documents=sum(of_source.documents for split in splits.values() for of_source in split.values()),
        bytes=sum(of_source.bytes for split in splits.values() for of_source in split.values()),
        splits=splits,
        sources={source.name: _count_source(source, parts, written) for source in recipe.sources},
        left_out=_skipped_by_source(recipe, parts),
        filters=specs,
        files={name: digest for shards in written for name, digest in shards.files.items()},
        samples={name: digest for shards in written for name, digest in shards.samples.items()},
    )


def _split_summaries(recipe: CorpusRecipe, written: list[WrittenShards]) -> dict[str, dict[str, SplitShards]]:
    splits: dict[str, dict[str, SplitShards]] = {split: {} for split in SPLITS}
    for split, of_split in splits.items():
        for source in recipe.sources:
            mine = [shards.splits[split] for shards in written if shards.source == source.name]
            of_split[source.name] = SplitShards(
                documents=sum(shards.documents for shards in mine),
                bytes=sum(shards.bytes for shards in mine),
                shards=[name for shards in mine for name in shards.shards],
                kind=source.kind,
            )
    return splits


def _count_source(source: SourceRecipe, parts: list[PartRecord], written: list[WrittenShards]) -> SourceCounts:
    mine = [part for part in parts if part.source == source.name]
    dropped: dict[str, DroppedDocuments] = {}
    for counts in [
        *(part.dropped for part in mine),
        *(shards.dropped for shards in written if shards.source == source.name),
    ]:
        for reason, more in counts.items():
            of_reason = dropped.setdefault(reason, DroppedDocuments())
            of_reason.documents += more.documents
            of_reason.bytes += more.bytes
            of_reason.samples = (of_reason.samples + more.samples)[:MAX_DROPPED_EXAMPLES_PER_SOURCE]
    return SourceCounts(
        files=sum(part.files for part in mine),
        read=ReadCounts(sum(part.read.documents for part in mine), sum(part.read.bytes for part in mine)),
        left_out=_sum_counts(part.left_out for part in mine),
        changed=_sum_counts(part.changed for part in mine),
        dropped=dropped,
        quarantine=[place for part in mine for place in part.quarantine][:MAX_QUARANTINED_PER_SOURCE],
    )


def _sum_counts(counted: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counted:
        total.update(part)
    return dict(total.most_common())


def _skipped_by_source(recipe: CorpusRecipe, parts: list[PartRecord]) -> dict[str, SkippedBySource]:
    """What was skipped, by source: records that gave no document, and unreadable files, each with its reason."""
    found = {}
    for source in recipe.sources:
        mine = [part for part in parts if part.source == source.name]
        found[source.name] = SkippedBySource(
            documents=_sum_counts(part.left_out for part in mine),
            files=_merge_skipped((part, part.unreadable) for part in mine),
            record_files=_merge_skipped((part, part.record_files) for part in mine),
        )
    return found


def _merge_skipped(skipped: Iterable[tuple[PartRecord, dict[str, SkippedFiles]]]) -> dict[str, SkippedFiles]:
    """Merge the files of parts in their order. A large file has several parts, one after the other, and counts once."""
    merged: dict[str, SkippedFiles] = {}
    last: dict[str, list[str]] = {}
    for part, by_reason in skipped:
        for reason, files in by_reason.items():
            if part.files or last.get(reason) != files.first:
                merged.setdefault(reason, SkippedFiles()).add(files.first, files.count)
            last[reason] = files.first
    return merged
