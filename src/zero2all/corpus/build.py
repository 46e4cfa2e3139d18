"""``z2a corpus build``: raw files to published documents.

Three stages of tasks over paths, run by any engine: parts (read and clean, a file a task), duplicates (hash-partitioned
shuffles through files), shards (split and publish). What is between them lies in ``<out>.work``, and a rerun does only
what changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zero2all.console import progress, warn
from zero2all.corpus.drops import evaluation_files, find_drops, strip_shared_lines
from zero2all.corpus.filters import DEFAULT_FILTERS, build_filters
from zero2all.corpus.filters.quality import quality_models
from zero2all.corpus.finish import group_parts, write_shards
from zero2all.corpus.mapping import mapping_for
from zero2all.corpus.parts import make_part
from zero2all.corpus.readers import LEAVES, RawFile, in_pieces, list_files
from zero2all.engine import Engine, all_cores
from zero2all.errors import UsageError, Z2aError
from zero2all.io import all_files, atomic_dir, fingerprint, is_current, read_json, refuse_strangers, write_manifest
from zero2all.paths import is_url
from zero2all.recipe import CorpusRecipe, SourceRecipe
from zero2all.units import show_bytes

KIND = "documents"
FORMAT = 5  # raised when the same inputs and options give other documents than before
NAMES_KEPT = 20  # of files left out, per reason, in the manifest
PLACES_KEPT = 100  # of broken records, per source, in the manifest
SAMPLES_KEPT = 5  # of dropped documents, per source and reason, in the manifest
SMALL = 8_000_000  # bytes; one process has read and cleaned them before others would be there


def build_corpus(recipe: CorpusRecipe, out: Path, engine: Engine | None = None) -> dict[str, Any]:
    """Read, clean, deduplicate and split every source into ``out``; return its manifest."""
    engine = engine or Engine()
    if not recipe.sources:
        raise UsageError("the recipe names no text: add corpus.sources, each with a name and paths")
    specs = list(DEFAULT_FILTERS) if recipe.filters is None else recipe.filters
    models = quality_models(build_filters(specs))  # a wrong name should be known before hours of reading
    for source in recipe.sources:
        mapping_for(source)
    files = [(source, piece) for source in recipe.sources for file in list_files(source) for piece in in_pieces(file)]
    _warn_of_links(files)
    keys = _part_keys(files, [specs, models])
    evaluation = [file.fingerprint for path in recipe.decontaminate for file in evaluation_files(path)]
    options = recipe.model_dump(
        mode="json", include={"dedup", "decontaminate", "contamination", "holdout", "shard_size"}
    )
    key = fingerprint([keys, options, evaluation])
    if is_current(out, KIND, key):
        return {**read_json(out / "manifest.json"), "reused": True}

    refuse_strangers(out, KIND)  # like the filters: not after hours of reading
    work = out.with_name(out.name + ".work")
    stems = [work / "parts" / f"{source.name}-{part_key}" for (source, _), part_key in zip(files, keys, strict=True)]
    parts = _make_parts(engine, files, specs, stems, keys)
    _remove_strangers(work / "parts", stems)
    full = [stem.with_suffix(".parquet") for stem, part in zip(stems, parts, strict=True) if part["documents"]]
    if not full:
        dropped = _count({why: n["documents"] for why, n in part["dropped"].items()} for part in parts)
        raise Z2aError(
            f"no document is left of {len(files)} files. Dropped: {dropped}; left out: {_left_out(recipe, parts)}"
        )
    lean = strip_shared_lines(engine, recipe, full, work)
    drops = find_drops(engine, recipe, list(lean.values()), work, key)
    with atomic_dir(out, KIND) as partial:
        written = _write_shards(engine, recipe, parts, stems, lean, drops, partial)
        splits = _splits(recipe, written)
        body = {
            "key": key,
            "format": FORMAT,
            "documents": sum(part["documents"] for split in splits.values() for part in split.values()),
            "bytes": sum(part["bytes"] for split in splits.values() for part in split.values()),
            "splits": splits,
            "sources": {source.name: _account(source, parts, written) for source in recipe.sources},
            "left_out": _left_out(recipe, parts),
            "filters": specs,
            "files": {name: digest for _, part in written for name, digest in part["files"].items()},
        }
        write_manifest(partial, KIND, body)
    for source in recipe.sources:
        if not splits["train"][source.name]["documents"]:
            warn(f"corpus source {source.name!r} gave no documents; see left_out in {out}/manifest.json")
    return {"kind": KIND, **body, "reused": False}


def _warn_of_links(files: list[tuple[SourceRecipe, RawFile]]) -> None:
    """Before hours of reading: a folder of links, such as a Hugging Face cache, gives nothing without the option."""
    for name, links in Counter(source.name for source, file in files if file.refused == LEAVES).items():
        warn(
            f"corpus source {name!r}: {links} link{'s' * (links > 1)} out of the source will not be read; "
            "if you trust the data, set follow_links: true on the source"
        )


def useful_workers(recipe: CorpusRecipe) -> int:
    """How many processes of this machine a build is worth."""
    if any(is_url(path) for source in recipe.sources for path in source.paths):
        return all_cores()
    size = sum(file.bytes for source in recipe.sources for file in list_files(source))
    return all_cores() if size >= SMALL else 1


def _part_keys(files: list[tuple[SourceRecipe, RawFile]], cleaning: list[Any]) -> list[str]:
    """Everything that each part depends on: the file as it is, how it is read, and how it is cleaned.

    Where a file lies is none of it, unless two look the same by name, size and time.
    """
    keys = []
    for source, file in files:
        reading = source.model_dump(mode="json", include={"name", "category", "fields", "mapping", "exclude"})
        keys.append(fingerprint([FORMAT, reading, file.name, file.fingerprint, cleaning]))
    seen = Counter(keys)
    return [
        key if seen[key] == 1 else fingerprint([key, file.path]) for key, (_, file) in zip(keys, files, strict=True)
    ]


def _make_parts(
    engine: Engine, files: list[tuple[SourceRecipe, RawFile]], specs: list[Any], stems: list[Path], keys: list[str]
) -> list[dict[str, Any]]:
    total = sum(file.bytes for _, file in files)
    # Large files first, so that the last task to end is a short one.
    order = sorted(range(len(files)), key=lambda number: -files[number][1].bytes)
    tasks = [(files[n][1], files[n][0], specs, stems[n], keys[n]) for n in order]
    with progress(f"reading {show_bytes(total)}", total) as advance:
        made = engine.run(make_part, tasks, lambda task: advance(tasks[task][0].bytes))
    parts = dict(zip(order, made, strict=True))
    return [parts[number] for number in range(len(files))]


def _remove_strangers(directory: Path, stems: list[Path]) -> None:
    """Parts of files that are gone or were read otherwise before."""
    wanted = {stem.with_suffix(suffix) for stem in stems for suffix in (".parquet", ".json")}
    for path in all_files(directory):
        if path not in wanted:
            path.unlink()


def _write_shards(
    engine: Engine,
    recipe: CorpusRecipe,
    parts: list[dict[str, Any]],
    stems: list[Path],
    lean: dict[Path, Path],
    drops: dict[Path, list[Path]],
    out: Path,
) -> list[tuple[str, dict[str, Any]]]:
    """(source, what was written) for every group of parts."""
    for split in ("train", "valid"):
        (out / split).mkdir()
    owners, tasks = [], []
    for source in recipe.sources:
        mine = [number for number, part in enumerate(parts) if part["source"] == source.name]
        for turn, group in enumerate(group_parts([parts[number] for number in mine], recipe.shard_size)):
            paths = [lean[stems[mine[number]].with_suffix(".parquet")] for number in group]
            owners.append(source.name)
            named = [(path, drops.get(path, [])) for path in paths]
            tasks.append((f"{source.name}-{turn:05}", named, out, recipe.shard_size, recipe.holdout))
    with progress("writing shards", len(tasks)) as advance:
        return list(zip(owners, engine.run(write_shards, tasks, lambda task: advance(1)), strict=True))


def _splits(recipe: CorpusRecipe, written: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
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


def _account(
    source: SourceRecipe, parts: list[dict[str, Any]], written: list[tuple[str, dict[str, Any]]]
) -> dict[str, Any]:
    """What became of a source, over all its files."""
    mine = [part for part in parts if part["source"] == source.name]
    dropped: dict[str, dict[str, Any]] = {}
    for counted in [*mine, *(part for owner, part in written if owner == source.name)]:
        for reason, part in counted["dropped"].items():
            of_reason = dropped.setdefault(reason, {"documents": 0, "bytes": 0, "samples": []})
            of_reason["documents"] += part["documents"]
            of_reason["bytes"] += part["bytes"]
            of_reason["samples"] = (of_reason["samples"] + part["samples"])[:SAMPLES_KEPT]
    return {
        "files": len(mine),
        "read": {what: sum(part["read"][what] for part in mine) for what in ("documents", "bytes")},
        "left_out": _count(part["left_out"] for part in mine),
        "changed": _count(part["changed"] for part in mine),
        "dropped": dropped,
        "quarantine": [place for part in mine for place in part["quarantine"]][:PLACES_KEPT],
    }


def _count(counted: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counted:
        total.update(part)
    return dict(total.most_common())


def _left_out(recipe: CorpusRecipe, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """By source: records that gave no document, and files that could not be read, each with its reason."""
    found: dict[str, Any] = {}
    for source in recipe.sources:
        mine = [part for part in parts if part["source"] == source.name]
        files: dict[str, Any] = {}
        for part in mine:
            if part["unreadable"]:
                of_reason = files.setdefault(part["unreadable"], {"count": 0, "first": []})
                of_reason["count"] += 1
                of_reason["first"] = [*of_reason["first"], part["file"]][:NAMES_KEPT]
        found[source.name] = {"documents": _count(part["left_out"] for part in mine), "files": files}
    return found
