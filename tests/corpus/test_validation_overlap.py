"""Train documents that are near duplicates of validation documents are dropped, on any engine, whatever `near` is."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.corpus.gids import make_gid
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import build_corpus
from zero2all.corpus.document import is_validation
from zero2all.recipe import CorpusRecipe, SourceRecipe

REASON = "near copy of a validation document"
HOLDOUT = 0.2
HAN = [chr(point) for point in range(0x4E00, 0x4E00 + 2000)]


def original(kind: str, number: int) -> str:
    rng = random.Random(f"{kind}-{number}")
    if kind == "zh":
        return "".join("".join(rng.choices(HAN, k=20)) + "，" for _ in range(20))
    words = [f"w{rng.randrange(5000)}" for _ in range(300)]
    return (
        "\n".join(f"{words[n]}({words[n + 1]}, {words[n + 2]})" for n in range(0, 297, 3))
        if kind == "code"
        else " ".join(words)
    )


def near_copy(text: str, number: int) -> str:
    """One place in the middle is another: Jaccard of some 0.95."""
    middle = len(text) // 2
    return f"{text[:middle]} Changed{number} {text[middle + 4 :]}"


def write_corpus(raw: Path) -> None:
    raw.mkdir()
    for kind in ("zh", "en", "code"):
        texts = [original(kind, number) for number in range(60)]
        texts += [near_copy(text, copy) for text in texts[:40] for copy in range(2)]
        random.Random(0).shuffle(texts)
        for part in range(3):
            lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts[part::3]]
            (raw / f"{kind}{part}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def recipe_of(raw: Path, **options: Any) -> CorpusRecipe:
    sources = [
        SourceRecipe(name=kind, paths=[str(raw / f"{kind}*.jsonl")], category="code" if kind == "code" else "")
        for kind in ("zh", "en", "code")
    ]
    return CorpusRecipe(sources=sources, **{"filters": [], "holdout": HOLDOUT, **options})


def texts_of(out: Path, split: str) -> list[tuple[str, str]]:
    rows = [row for shard in sorted((out / split).glob("*.parquet")) for row in pq.read_table(shard).to_pylist()]
    return [(row["data_src"], row["content"]) for row in rows]


def shingles(text: str, kind: str) -> set[str]:
    units = list(text.replace("，", "").replace(" ", "")) if kind == "zh" else text.split()
    return {" ".join(units[n : n + 5]) for n in range(len(units) - 4)}


def crossing(out: Path) -> int:
    """Pairs of a train and a validation document that are similar, by comparing all with all."""
    train, valid = texts_of(out, "train"), texts_of(out, "valid")
    sets = {pair: shingles(pair[1], pair[0]) for pair in (*train, *valid)}
    return sum(
        len(sets[one] & sets[other]) >= 0.8 * len(sets[one] | sets[other])
        for one in train
        for other in valid
        if one[0] == other[0]
    )


@pytest.mark.parametrize("near", [False, True])
def test_no_train_document_is_a_near_copy_of_a_validation_document(tmp_path: Path, near: bool) -> None:
    write_corpus(tmp_path / "raw")
    manifest = build_corpus(recipe_of(tmp_path / "raw", dedup={"near": near}), tmp_path / "out")
    assert crossing(tmp_path / "out") == 0
    valid, train = texts_of(tmp_path / "out", "valid"), texts_of(tmp_path / "out", "train")
    assert all(is_validation(make_gid(kind, "", text), HOLDOUT) for kind, text in valid)
    dropped = {source: part.dropped.get(REASON) for source, part in manifest.sources.items()}
    if near:
        assert len(valid) + len(train) == 180  # the best of each family stays, and nothing crosses
    else:
        assert all(part.documents >= 10 and part.samples for part in dropped.values())
        gone = sum(part.documents for part in dropped.values())
        assert len(valid) + len(train) + gone == 3 * 140


def test_near_duplicates_within_train_stay_where_near_is_off(tmp_path: Path) -> None:
    write_corpus(tmp_path / "raw")
    manifest = build_corpus(recipe_of(tmp_path / "raw", holdout=0), tmp_path / "out")
    assert manifest.documents == 3 * 140
    assert not any(REASON in part.dropped for part in manifest.sources.values())


def test_workers_and_shards_change_nothing_and_a_rerun_resumes(tmp_path: Path) -> None:
    write_corpus(tmp_path / "raw")
    one = build_corpus(recipe_of(tmp_path / "raw"), tmp_path / "one")
    two = build_corpus(recipe_of(tmp_path / "raw"), tmp_path / "two", TaskEngine(workers=2))
    assert one.files == two.files
    shutil.rmtree(tmp_path / "two")
    done = tmp_path / "two.work" / "validation" / "done.json"
    before = done.stat().st_mtime_ns
    again = build_corpus(recipe_of(tmp_path / "raw"), tmp_path / "two")
    assert again.files == one.files
    assert done.stat().st_mtime_ns == before  # what was found out is not found out again
    done.unlink()
    shutil.rmtree(tmp_path / "two")
    assert build_corpus(recipe_of(tmp_path / "raw"), tmp_path / "two").files == one.files


def test_a_validation_document_that_goes_itself_takes_nothing_with_it(tmp_path: Path, raw: Path) -> None:
    """A copy of evaluation text in the validation split is dropped, so that its near duplicates need not be."""
    number = next(n for n in range(1000) if is_validation(make_gid("en", "", original("en", n)), HOLDOUT))
    held = original("en", number)
    copies = [near_copy(held, copy) for copy in range(20)]
    train = [text for text in copies if not is_validation(make_gid("en", "", text), HOLDOUT)]
    (raw / "en0.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [held, train[0]]))
    source = SourceRecipe(name="en", paths=[str(raw)])
    plain = build_corpus(CorpusRecipe(sources=[source], filters=[], holdout=HOLDOUT), tmp_path / "plain")
    assert plain.sources["en"].dropped[REASON].documents == 1
    middle = held[len(held) // 2 - 60 : len(held) // 2 + 60]  # what only the held-out one has in a row
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": middle}))
    options: dict[str, Any] = {"decontaminate": [str(tmp_path / "eval.jsonl")], "contamination": {"min_hits": 1}}
    recipe = CorpusRecipe(sources=[source], filters=[], holdout=HOLDOUT, **options)
    manifest = build_corpus(recipe, tmp_path / "clean")
    assert texts_of(tmp_path / "clean", "train") == [("en", train[0])]
    assert REASON not in manifest.sources["en"].dropped
