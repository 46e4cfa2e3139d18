"""Where a source has too few documents to hold whole ones out, validation text comes from inside long ones."""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.builds import Row, corpus_of, make_gid, rows_of, source_of, write_lines, write_texts
from zero2all.base.tasks import TaskEngine
from zero2all.corpus import BuiltCorpus, build_corpus
from zero2all.corpus.document import gid_in_split, is_validation
from zero2all.corpus.validation_split import (
    COPY,
    GAP,
    LONG_CHARACTERS,
    MIN_VALIDATION_BYTES,
    WINDOW_CHARACTERS,
    place_blocks,
)
from zero2all.recipe import CorpusRecipe, SourceRecipe

HAN = [chr(point) for point in range(0x4E00, 0x4E00 + 2000)]
LONG = 60_000


def book(seed: object, characters: int = LONG, kind: str = "en") -> str:
    rng = random.Random(f"{seed}")
    if kind == "zh":
        return "".join("".join(rng.choices(HAN, k=20)) + "。" for _ in range(characters // 21))
    words = [f"w{rng.randrange(5000)}" for _ in range(characters // 6)]
    return "\n".join(" ".join(words[at : at + 12]) for at in range(0, len(words), 12))


def book_in(split: str, holdout: float, characters: int = LONG, source: str = "s", id: str = "") -> str:
    """A book that the split by document has in the given split."""
    texts = (book(seed, characters) for seed in range(10_000))
    return next(text for text in texts if is_validation(make_gid(source, id, text), holdout) == (split == "valid"))


def build(root: Path, texts: dict[str, list[str]], holdout: float = 0.1) -> tuple[BuiltCorpus, dict[str, list[Row]]]:
    """Texts by source, as JSONL without ids; the manifest, and the rows of each split."""
    root.mkdir()
    sources = []
    for name, of_source in texts.items():
        lines = ({"title": f"book {number}", "text": text} for number, text in enumerate(of_source))
        sources.append(source_of(write_lines(root / f"{name}.jsonl", lines), name))
    manifest = build_corpus(corpus_of(*sources, holdout=holdout), root / "out")
    return manifest, {split: rows_of(root / "out", split) for split in ("train", "valid")}


def span_of(row: Row) -> tuple[int, int]:
    start, stop = row["id"].rpartition("[")[2].rstrip("]").split(":")
    return int(start), int(stop)


def characters(rows: list[Row]) -> int:
    return sum(len(row["content"]) for row in rows)


def ngrams(text: str, n: int = 13) -> set[str]:
    units = text.split() if " " in text else list(text.replace("。", ""))
    return {" ".join(units[at : at + n]) for at in range(len(units) - n + 1)}


def most_copied(rows: dict[str, list[Row]]) -> float:
    """The largest share of validation n-grams in any thousand characters of train text, by comparing all with all."""
    held = {ngram for row in rows["valid"] for ngram in ngrams(row["content"])}
    windows = [row["content"][at : at + 1000] for row in rows["train"] for at in range(0, len(row["content"]), 250)]
    return max(len(ngrams(window) & held) / max(1, len(ngrams(window))) for window in windows)


@pytest.mark.parametrize("kind", ["en", "zh"])
@pytest.mark.parametrize("holdout", [0.01, 0.3])
def test_one_book_is_trained_on_and_validated_on(tmp_path: Path, kind: str, holdout: float) -> None:
    text = book(1, 200_000, kind)
    manifest, rows = build(tmp_path / "one", {"s": [text]}, holdout)
    parent = make_gid("s", "", text)
    for split, of_split in rows.items():
        for row in of_split:
            start, stop = span_of(row)
            assert row["content"] == text[start:stop]
            assert (row["title"], json.loads(row["others"])["part_of"]) == ("book 0", parent)
            assert is_validation(row["gid"], holdout) == (split == "valid")
    wanted = max(holdout * len(text), 4 * WINDOW_CHARACTERS)
    assert 0.8 * wanted <= characters(rows["valid"]) <= 1.3 * wanted
    assert len({row["gid"] for row in (*rows["train"], *rows["valid"])}) == sum(map(len, rows.values()))
    in_order = sorted((*span_of(row), split) for split in rows for row in rows[split])
    assert in_order[0][0] == 0
    assert in_order[-1][1] == len(text)
    for (_, stop, one), (start, _, other) in pairwise(in_order):
        assert one != other
        assert start - stop >= WINDOW_CHARACTERS
    counts = manifest.sources["s"]
    assert list(counts.dropped) == [GAP]
    kept = manifest.splits["train"]["s"].bytes + manifest.splits["valid"]["s"].bytes
    assert counts.read.bytes == kept + counts.dropped[GAP].bytes


def test_one_document_that_chance_would_not_choose_gives_blocks(tmp_path: Path) -> None:
    _, rows = build(tmp_path / "one", {"s": [book_in("train", 0.9, 36_000)]}, 0.01)
    assert MIN_VALIDATION_BYTES <= characters(rows["valid"]) < 0.2 * 36_000


def test_of_two_equal_documents_one_is_cut(tmp_path: Path) -> None:
    manifest, rows = build(tmp_path / "twice", {"s": [book(1), book(1), book(2)]})
    assert manifest.sources["s"].dropped["exact copy"].documents == 1
    assert manifest.sources["s"].dropped[GAP].documents == 4
    assert len(rows["valid"]) == 2


def test_the_blocks_of_a_book_stay_when_another_is_added(tmp_path: Path) -> None:
    first, second = book("first", 300_000), book("second", 300_000)
    _, alone = build(tmp_path / "alone", {"s": [first]}, 0.02)
    _, both = build(tmp_path / "both", {"s": [second, first]}, 0.02)
    for split in ("train", "valid"):
        assert {row["gid"] for row in alone[split]} < {row["gid"] for row in both[split]}


@pytest.mark.parametrize("long_in", ["train", "valid"])
@pytest.mark.parametrize("short_in", ["train", "valid"])
def test_a_long_and_a_short_document_give_both_splits(tmp_path: Path, long_in: str, short_in: str) -> None:
    long, short = book_in(long_in, 0.1), book_in(short_in, 0.1, 600)
    _, rows = build(tmp_path / "two", {"s": [long, short]}, 0.1)
    assert characters(rows["valid"]) >= MIN_VALIDATION_BYTES
    assert characters(rows["train"]) > 0.7 * len(long)
    assert [short] == [row["content"] for row in rows[short_in] if "part_of" not in row["others"]]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_only_short_documents_are_a_warning_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    _, rows = build(tmp_path / "short", {"s": [book_in(split, 0.1, 5000)]}, 0.1)
    said = " ".join(capsys.readouterr().err.split())
    assert f"join short ones into a file of {LONG_CHARACTERS:,} characters or more" in said
    assert ("raise corpus.holdout" if split == "train" else "lower corpus.holdout") in said
    assert [len(of_split) for of_split in rows.values()] == ([1, 0] if split == "train" else [0, 1])


def test_sources_with_a_usable_split_by_document_are_split_as_always(tmp_path: Path) -> None:
    """Many documents, though most of their text is in one that is held out; and few, of which one is held out."""
    many = [*(book(number, 400) for number in range(210)), book_in("valid", 0.1, 200_000, "many")]
    few = [book_in("valid", 0.1, source="few"), *(book_in("train", 0.1, n, "few") for n in (50_000, 60_000, 70_000))]
    _, rows = build(tmp_path / "as always", {"many": many, "few": few}, 0.1)
    expected = {make_gid(name, "", text) for name, texts in (("many", many), ("few", few)) for text in texts}
    assert {row["gid"] for split in rows.values() for row in split} == expected
    for split, of_split in rows.items():
        assert all(is_validation(row["gid"], 0.1) == (split == "valid") for row in of_split)


def test_medium_documents_give_about_the_fraction_together(tmp_path: Path) -> None:
    """The smallest block of each would be far more than the fraction."""
    texts = [text for number in range(60) if not is_validation(make_gid("s", "", text := book(number, 36_000)), 0.02)]
    _, rows = build(tmp_path / "medium", {"s": texts}, 0.02)
    assert 0.2 < characters(rows["valid"]) / (0.02 * sum(map(len, texts))) < 3


def test_another_edition_of_a_book_does_not_bring_validation_text_into_training(tmp_path: Path) -> None:
    """The same words but for one in forty, behind a preface: in the same source, and inside a document of another."""
    text = book("edition", 100_000)
    rng = random.Random(0)
    other = book("preface", 3000) + " ".join(word if rng.random() > 0.025 else "new" for word in text.split(" "))
    many = [book(number, 1500) for number in range(220)]
    _, clean = build(tmp_path / "clean", {"s": [text], "many": many}, 0.1)
    manifest, rows = build(tmp_path / "both", {"s": [text, other], "many": [*many, book("x", 2000) + text]}, 0.1)
    assert most_copied(clean) < 0.1
    assert most_copied(rows) < 0.5
    assert manifest.sources["s"].dropped[COPY].documents
    assert manifest.sources["many"].dropped[COPY].documents
    assert (
        characters(rows["train"]) > 2 * characters(clean["train"]) - characters([*rows["valid"], *clean["valid"]]) * 3
    )
    whole = [{row["gid"] for row in one["train"] if row["data_src"] == "many"} for one in (clean, rows)]
    assert whole[0] < whole[1]  # documents without such text are not touched


def test_a_book_that_repeats_itself_is_not_trained_on_where_it_repeats_a_block(tmp_path: Path) -> None:
    text = book("twice", 80_000)
    _, rows = build(tmp_path / "twice", {"s": [f"{text}\n{text}"]}, 0.1)
    assert characters(rows["train"]) > 0.5 * 2 * len(text)
    assert most_copied(rows) < 0.5


def test_text_without_words_gives_blocks_too(tmp_path: Path) -> None:
    """It has no n-grams to compare, as base64 has not."""
    text = "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=LONG))
    _, rows = build(tmp_path / "two", {"s": [text, book("words", 3000)]})
    assert characters(rows["valid"]) >= MIN_VALIDATION_BYTES
    assert characters(rows["train"]) > 0.7 * LONG


@given(windows=st.integers(24, 20_000), holdout=st.floats(1e-6, 0.999), gid=st.integers(0, 2**128 - 1))
@settings(max_examples=200)
def test_blocks_have_room_beside_them(windows: int, holdout: float, gid: int) -> None:
    blocks = place_blocks(f"{gid:032x}", windows, holdout)
    assert blocks
    assert all(len(block) > 0 for block in blocks)
    assert blocks[0].start >= 1
    assert blocks[-1].stop <= windows - 1
    assert all(after.start - before.stop >= 2 for before, after in pairwise(blocks))
    held = sum(map(len, blocks))
    assert held + 2 * len(blocks) < windows  # something is left to train on
    if 4 / windows < holdout < 0.5:
        assert 0.9 * holdout * windows - 1 <= held <= holdout * windows + len(blocks)


@given(text=st.text(max_size=40), valid=st.booleans(), holdout=st.floats(1e-12, 0.999999))
@settings(max_examples=200)
def test_a_gid_of_part_of_a_document_lies_on_its_side_of_the_split(text: str, valid: bool, holdout: float) -> None:
    gid = gid_in_split(text, valid=valid, holdout=holdout)
    assert len(gid) == 32
    assert is_validation(gid, holdout) == valid


# --- near duplicates of validation documents

REASON = "near copy of a validation document"
HOLDOUT = 0.2


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


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tmp_path_factory.mktemp("raw")
    for kind in ("zh", "en", "code"):
        texts = [original(kind, number) for number in range(60)]
        texts += [near_copy(text, copy) for text in texts[:40] for copy in range(2)]
        random.Random(0).shuffle(texts)
        for part in range(3):
            write_texts(raw / f"{kind}{part}.jsonl", texts[part::3])
    return raw


def recipe_of(raw: Path, **options: Any) -> CorpusRecipe:
    code = SourceRecipe(name="code", paths=[str(raw / "code*.jsonl")], category="code")
    prose = (source_of(raw / f"{kind}*.jsonl", kind) for kind in ("zh", "en"))
    return corpus_of(*prose, code, **{"holdout": HOLDOUT, **options})


def texts_of(out: Path, split: str) -> list[tuple[str, str]]:
    return [(row["data_src"], row["content"]) for row in rows_of(out, split)]


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
def test_no_train_document_is_a_near_copy_of_a_validation_document(tmp_path: Path, raw: Path, near: bool) -> None:
    manifest = build_corpus(recipe_of(raw, dedup={"near": near}), tmp_path / "out")
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


def test_near_duplicates_within_train_stay_where_near_is_off(tmp_path: Path, raw: Path) -> None:
    manifest = build_corpus(recipe_of(raw, holdout=0), tmp_path / "out")
    assert manifest.documents == 3 * 140
    assert not any(REASON in part.dropped for part in manifest.sources.values())


def test_workers_and_shards_change_nothing_and_a_rerun_resumes(tmp_path: Path, raw: Path) -> None:
    one = build_corpus(recipe_of(raw), tmp_path / "one")
    two = build_corpus(recipe_of(raw), tmp_path / "two", TaskEngine(workers=2))
    assert one.files == two.files
    shutil.rmtree(tmp_path / "two")
    done = tmp_path / "two.work" / "validation" / "done.json"
    before = done.stat().st_mtime_ns
    again = build_corpus(recipe_of(raw), tmp_path / "two")
    assert again.files == one.files
    assert done.stat().st_mtime_ns == before  # what was found out is not found out again
    done.unlink()
    shutil.rmtree(tmp_path / "two")
    assert build_corpus(recipe_of(raw), tmp_path / "two").files == one.files


def test_a_validation_document_that_goes_itself_takes_nothing_with_it(tmp_path: Path) -> None:
    """A copy of evaluation text in the validation split is dropped, so that its near duplicates need not be."""
    number = next(n for n in range(1000) if is_validation(make_gid("en", "", original("en", n)), HOLDOUT))
    held = original("en", number)
    copies = [near_copy(held, copy) for copy in range(20)]
    train = [text for text in copies if not is_validation(make_gid("en", "", text), HOLDOUT)]
    source = source_of(write_texts(tmp_path / "en.jsonl", [held, train[0]]), "en")
    plain = build_corpus(corpus_of(source, holdout=HOLDOUT), tmp_path / "plain")
    assert plain.sources["en"].dropped[REASON].documents == 1
    middle = held[len(held) // 2 - 60 : len(held) // 2 + 60]  # what only the held-out one has in a row
    exam = write_lines(tmp_path / "eval.jsonl", [{"question": middle}])
    recipe = corpus_of(source, holdout=HOLDOUT, decontaminate=[str(exam)], contamination={"min_hits": 1})
    manifest = build_corpus(recipe, tmp_path / "clean")
    assert texts_of(tmp_path / "clean", "train") == [("en", train[0])]
    assert REASON not in manifest.sources["en"].dropped
