"""The validation split: blocks of long documents where there are too few, and train documents that repeat it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from zero2all.console import say
from zero2all.corpus.dedup.params import DedupParams
from zero2all.corpus.dedup.validation_overlap import (
    build_validation_index,
    write_validation_drops,
    write_validation_signatures,
)
from zero2all.corpus.dedup_stage import FinishedStep, task_runner
from zero2all.corpus.part_files import PartFile
from zero2all.corpus.validation_blocks import (
    BlockChoice,
    SplitSizes,
    cut_drops_path,
    measure_split,
    merge_block_ngrams,
    write_block_ngrams,
    write_cut_part,
)
from zero2all.engine import Engine
from zero2all.io import fingerprint, read_finished, write_json
from zero2all.recipe import CorpusRecipe

FEW_EXPECTED_DOCUMENTS = 20  # in the smaller split: with more, chance hardly leaves it empty
MIN_VALIDATION_BYTES = 4096


def split_parts(engine: Engine, recipe: CorpusRecipe, parts: list[PartFile], work: Path, key: str) -> list[PartFile]:
    """The parts with documents cut and drop files added, so that every gid tells its split and nothing crosses it.

    ``key`` fingerprints everything that the documents depend on.
    """
    if not recipe.holdout:
        return parts
    chats = {source.name for source in recipe.sources if source.kind != "text"}
    cut = _cut_parts(engine, recipe.holdout, parts, chats, work / "blocks")
    cut_names = [after.path.name for before, after in zip(parts, cut, strict=True) if before is not after]
    key = fingerprint([key, cut_names]) if cut_names else key
    # After the other drops, since a validation document that is dropped itself drops no train document.
    return _drop_near_validation(engine, recipe, cut, work / "validation", key)


def _cut_parts(engine: Engine, holdout: float, parts: list[PartFile], chats: set[str], work: Path) -> list[PartFile]:
    """``chats`` are sources whose documents are dropped or kept as a whole."""
    choices = _choose_blocks(engine, holdout, [part for part in parts if part.record.source not in chats])
    if not choices:
        return parts
    chosen = [part for part in parts if part.record.source in choices]
    files = [work / "ngrams" / f"{part.path.name}.npy" for part in chosen]
    outs = [work / "cut" / part.path.name for part in parts]
    title = "taking validation text from long documents"
    with task_runner(engine, title, len(chosen) + 1 + len(parts)) as run_tasks:
        names = [part.record.source for part in parts]
        with_blocks = [(part.path, part.drop_files, choices[part.record.source]) for part in chosen]
        counts = run_tasks(write_block_ngrams, [(*task, out) for task, out in zip(with_blocks, files, strict=True)])
        run_tasks(merge_block_ngrams, [(files, work / "ngrams.npy")])
        tasks = [
            (part.path, part.drop_files, choices.get(name), holdout, work / "ngrams.npy", out, name not in chats)
            for part, name, out in zip(parts, names, outs, strict=True)
        ]
        was_cut = run_tasks(write_cut_part, tasks)
    for name in choices:
        documents = sum(count for part, count in zip(chosen, counts, strict=True) if part.record.source == name)
        say(f"{name}: too few documents to hold whole ones out; validation text is taken from inside {documents}")
    return [
        replace(part, path=out, drop_files=(*part.drop_files, cut_drops_path(out))) if changed else part
        for part, out, changed in zip(parts, outs, was_cut, strict=True)
    ]


def _choose_blocks(engine: Engine, holdout: float, parts: list[PartFile]) -> dict[str, BlockChoice]:
    """By source: those that have long documents and no usable split by document, because they have few documents."""
    documents: Counter[str] = Counter()
    for part in parts:
        documents[part.record.source] += part.record.documents
    few = {name for name, count in documents.items() if count * min(holdout, 1 - holdout) < FEW_EXPECTED_DOCUMENTS}
    measured = [part for part in parts if part.record.source in few]
    sizes = engine.run(measure_split, [(part.path, part.drop_files, holdout) for part in measured])
    choices = {}
    for name in sorted(few):
        mine = [size for part, size in zip(measured, sizes, strict=True) if part.record.source == name]
        long_gids = [gid for size in mine for gid in size.long_gids]
        if long_gids and not _is_usable_split(mine, holdout):
            choices[name] = BlockChoice(holdout, min(long_gids))
    return choices


def _is_usable_split(sizes: list[SplitSizes], holdout: float) -> bool:
    """Whether there is validation text to speak of, and training has at least half of what it should have."""
    train = sum(size.train_bytes for size in sizes)
    valid = sum(size.valid_bytes for size in sizes)
    return valid >= MIN_VALIDATION_BYTES and train >= (1 - holdout) / 2 * (train + valid)


def _drop_near_validation(
    engine: Engine, recipe: CorpusRecipe, parts: list[PartFile], work: Path, key: str
) -> list[PartFile]:
    """Add to each part a file that names its train documents that are near duplicates of validation documents."""
    outs = [work / "drops" / part.path.name for part in parts]
    added = [replace(part, drop_files=(*part.drop_files, out)) for part, out in zip(parts, outs, strict=True)]
    done = work / "done.json"
    if read_finished(FinishedStep, done, key):
        return added
    done.unlink(missing_ok=True)
    params = DedupParams(threshold=recipe.dedup.threshold)
    signed = [work / "signed" / f"{part.path.name}.npy" for part in parts]
    with task_runner(engine, "finding duplicates of validation documents", 2 * len(parts) + 1) as run_tasks:
        files = [(part.path, part.drop_files, recipe.holdout) for part in parts]
        run_tasks(write_validation_signatures, [(*of, out, params) for of, out in zip(files, signed, strict=True)])
        (documents,) = run_tasks(build_validation_index, [(signed, work / "index", params)])
        tasks = [(*of, work / "index", out, params) for of, out in zip(files, outs, strict=True)]
        counts = run_tasks(write_validation_drops, tasks)
    write_json(done, {"key": key, "validation": documents, "dropped": sum(counts)})
    return added
