"""``z2a corpus build``: raw files to published documents.

Three stages of tasks over paths, run by any engine: parts (read and clean, a file a task), duplicates (hash-partitioned
shuffles through files), shards (split and publish). Intermediate files are in ``<out>.work``; a rerun redoes only
what changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zero2all.console import progress, warn
from zero2all.corpus.dedup_stage import evaluation_files, find_drops, remove_boilerplate
from zero2all.corpus.document_shards import group_parts_by_size, write_shards
from zero2all.corpus.filters import DEFAULT_FILTERS, build_filters
from zero2all.corpus.filters.quality_classifier import quality_model_checksums
from zero2all.corpus.mapping import resolve_mapping
from zero2all.corpus.part_files import write_part
from zero2all.corpus.readers import LINK_OUTSIDE_SOURCE, RawFile, list_files, split_large_file
from zero2all.engine import Engine, available_cores
from zero2all.errors import UsageError, Z2aError
from zero2all.io import all_files, atomic_dir, fingerprint, is_current, read_json, refuse_strangers, write_manifest
from zero2all.paths import is_url
from zero2all.recipe import CorpusRecipe, SourceRecipe
from zero2all.units import show_bytes

KIND = "documents"
FORMAT = 5  # raised when the same inputs and options give other documents than before
MAX_SKIPPED_NAMES_PER_REASON = 20  # of skipped files, per reason, in the manifest
MAX_QUARANTINED_PER_SOURCE = 100  # of broken records, per source, in the manifest
MAX_DROPPED_EXAMPLES_PER_SOURCE = 5  # of dropped documents, per source and reason, in the manifest
MIN_PARALLEL_BYTES = 8_000_000  # one process reads and cleans them before other workers would have started


def build_corpus(recipe: CorpusRecipe, out: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Read, clean, deduplicate and split every source into ``out``; return its manifest."""
    engine = engine or Engine()
    if not recipe.sources:
        raise UsageError("the recipe names no text: add corpus.sources, each with a name and paths")
    specs = list(DEFAULT_FILTERS) if recipe.filters is None else recipe.filters
    models = quality_model_checksums(build_filters(specs))  # fail on a wrong name before hours of reading
    for source in recipe.sources:
        resolve_mapping(source)
    files = [
        (source, part) for source in recipe.sources for file in list_files(source) for part in split_large_file(file)
    ]
    _warn_about_links(files)
    keys = _part_keys(files, [specs, models])
    evaluation = [file.fingerprint for path in recipe.decontaminate for file in evaluation_files(path)]
    options = recipe.model_dump(
        mode="json", include={"dedup", "decontaminate", "contamination", "holdout", "shard_size"}
    )
    key = fingerprint([keys, options, evaluation])
    if is_current(out, KIND, key):
        return {**read_json(out / "manifest.json"), "reused": True}

    refuse_strangers(out, KIND)  # like the filters: before hours of reading
    work = out.with_name(out.name + ".work")
    stems = [work / "parts" / f"{source.name}-{part_key}" for (source, _), part_key in zip(files, keys, strict=True)]
    parts = _write_parts(engine, files, specs, stems, keys)
    _remove_stale_parts(work / "parts", stems)
    nonempty = [stem.with_suffix(".parquet") for stem, part in zip(stems, parts, strict=True) if part["documents"]]
    if not nonempty:
        dropped = _sum_counts({why: n["documents"] for why, n in part["dropped"].items()} for part in parts)
        raise Z2aError(
            f"no document is left of {len(files)} files. Dropped: {dropped}; "
            f"skipped: {_skipped_by_source(recipe, parts)}"
        )
    stripped = remove_boilerplate(engine, recipe, nonempty, work)
    drops = find_drops(engine, recipe, list(stripped.values()), work, key)
    with atomic_dir(out, KIND) as partial:
        written = _write_shards(engine, recipe, parts, stems, stripped, drops, partial)
        splits = _split_summaries(recipe, written)
        body = {
            "key": key,
            "format": FORMAT,
            "documents": sum(part["documents"] for split in splits.values() for part in split.values()),
            "bytes": sum(part["bytes"] for split in splits.values() for part in split.values()),
            "splits": splits,
            "sources": {source.name: _source_summary(source, parts, written) for source in recipe.sources},
            "left_out": _skipped_by_source(recipe, parts),
            "filters": specs,
            "files": {name: digest for _, part in written for name, digest in part["files"].items()},
        }
        write_manifest(partial, KIND, body)
    for source in recipe.sources:
        if not splits["train"][source.name]["documents"]:
            warn(f"corpus source {source.name!r} gave no documents; see left_out in {out}/manifest.json")
    return {"kind": KIND, **body, "reused": False}


def _warn_about_links(files: list[tuple[SourceRecipe, RawFile]]) -> None:
    """Before hours of reading: a folder of links, such as a Hugging Face cache, gives nothing without the option."""
    for name, links in Counter(
        source.name for source, file in files if file.skip_reason == LINK_OUTSIDE_SOURCE
    ).items():
        warn(
            f"corpus source {name!r}: {links} link{'s' * (links > 1)} out of the source will not be read; "
            "if you trust the data, set follow_links: true on the source"
        )


def recommended_workers(recipe: CorpusRecipe) -> int:
    """The number of local worker processes that pays off for a build."""
    if any(is_url(path) for source in recipe.sources for path in source.paths):
        return available_cores()
    size = sum(file.bytes for source in recipe.sources for file in list_files(source))
    return available_cores() if size >= MIN_PARALLEL_BYTES else 1


def _part_keys(files: list[tuple[SourceRecipe, RawFile]], cleaning: list[Any]) -> list[str]:
    """Everything that each part depends on: the file as it is, how it is read, and how it is cleaned.

    The path of a file is not part of it, unless two files have the same name, size and time.
    """
    keys = []
    for source, file in files:
        reading = source.model_dump(mode="json", include={"name", "category", "fields", "mapping", "exclude"})
        keys.append(fingerprint([FORMAT, reading, file.name, file.fingerprint, cleaning]))
    seen = Counter(keys)
    return [
        key if seen[key] == 1 else fingerprint([key, file.path]) for key, (_, file) in zip(keys, files, strict=True)
    ]


def _write_parts(
    engine: Engine, files: list[tuple[SourceRecipe, RawFile]], specs: list[Any], stems: list[Path], keys: list[str]
) -> list[dict[str, Any]]:
    total = sum(file.bytes for _, file in files)
    # Large files first, so that the last task to end is a short one.
    order = sorted(range(len(files)), key=lambda number: -files[number][1].bytes)
    tasks = [(files[n][1], files[n][0], specs, stems[n], keys[n]) for n in order]
    with progress(f"reading {show_bytes(total)}", total) as advance:
        made = engine.run(write_part, tasks, lambda task: advance(tasks[task][0].bytes))
    parts = dict(zip(order, made, strict=True))
    return [parts[number] for number in range(len(files))]


def _remove_stale_parts(directory: Path, stems: list[Path]) -> None:
    """Remove parts of files that no longer exist or were read with other options."""
    wanted = {stem.with_suffix(suffix) for stem in stems for suffix in (".parquet", ".json")}
    for path in all_files(directory):
        if path not in wanted:
            path.unlink()


def _write_shards(
    engine: Engine,
    recipe: CorpusRecipe,
    parts: list[dict[str, Any]],
    stems: list[Path],
    stripped: dict[Path, Path],
    drops: dict[Path, list[Path]],
    out: Path,
) -> list[tuple[str, dict[str, Any]]]:
    """(source, what was written) for every group of parts."""
    for split in ("train", "valid"):
        (out / split).mkdir()
    owners, tasks = [], []
    for source in recipe.sources:
        mine = [number for number, part in enumerate(parts) if part["source"] == source.name]
        for turn, group in enumerate(group_parts_by_size([parts[number] for number in mine], recipe.shard_size)):
            paths = [stripped[stems[mine[number]].with_suffix(".parquet")] for number in group]
            owners.append(source.name)
            named = [(path, drops.get(path, [])) for path in paths]
            tasks.append((f"{source.name}-{turn:05}", named, out, recipe.shard_size, recipe.holdout))
    with progress("writing shards", len(tasks)) as advance:
        return list(zip(owners, engine.run(write_shards, tasks, lambda task: advance(1)), strict=True))


def _split_summaries(recipe: CorpusRecipe, written: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    splits: dict[str, Any] = {"train": {}, "valid": {}}
    for split, of_split in splits.items():
        for source in recipe.sources:
            mine = [part[split] for owner, part in written if owner == source.name]
            of_split[source.name] = {
                "documents": sum(part["documents"] for part in mine),
                "bytes": sum(part["bytes"] for part in mine),
                "shards": [shard for part in mine for shard in part["shards"]],
            }
    return splits


def _source_summary(
    source: SourceRecipe, parts: list[dict[str, Any]], written: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Counts of a source over all its files."""
    mine = [part for part in parts if part["source"] == source.name]
    dropped: dict[str, dict[str, Any]] = {}
    for counted in [*mine, *(part for owner, part in written if owner == source.name)]:
        for reason, part in counted["dropped"].items():
            of_reason = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "samples": []})
            of_reason["documents"] += part["documents"]
            of_reason["bytes"] += part["bytes"]
            of_reason["samples"] = (of_reason["samples"] + part["samples"])[:MAX_DROPPED_EXAMPLES_PER_SOURCE]
    return {
        "files": len(mine),
        "read": {what: sum(part["read"][what] for part in mine) for what in ("documents", "bytes")},
        "left_out": _sum_counts(part["left_out"] for part in mine),
        "changed": _sum_counts(part["changed"] for part in mine),
        "dropped": dropped,
        "quarantine": [place for part in mine for place in part["quarantine"]][:MAX_QUARANTINED_PER_SOURCE],
    }


def _sum_counts(counted: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counted:
        total.update(part)
    return dict(total.most_common())


def _skipped_by_source(recipe: CorpusRecipe, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """By source: records that gave no document, and files that could not be read, each with its reason."""
    found: dict[str, Any] = {}
    for source in recipe.sources:
        mine = [part for part in parts if part["source"] == source.name]
        files: dict[str, Any] = {}
        for part in mine:
            if part["unreadable"]:
                of_reason = files.setdefault(part["unreadable"], {"count": 0, "first": []})
                of_reason["count"] += 1
                of_reason["first"] = [*of_reason["first"], part["file"]][:MAX_SKIPPED_NAMES_PER_REASON]
        found[source.name] = {"documents": _sum_counts(part["left_out"] for part in mine), "files": files}
    return found
