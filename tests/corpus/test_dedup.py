"""Deduplication against brute force over sets of shingles, on injected duplicates and on real families of documents.

Recall: of all pairs with Jaccard >= 0.8, the share in which at least one document was dropped.
Precision: of all documents dropped as near duplicates, the share with Jaccard >= 0.7 to the document kept for them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import tarfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.builds import make_gid
from zero2all.base.errors import UsageError
from zero2all.corpus.dedup.decontaminate import (
    build_decontamination_index,
    find_contamination,
    load_decontamination_index,
    write_contamination_drops,
)
from zero2all.corpus.dedup.drops import DROP_DTYPE
from zero2all.corpus.dedup.exact import nfkc
from zero2all.corpus.dedup.near import (
    band_rows,
    both_directions,
    cluster_by_leader,
    connect_components,
    make_edges,
    node_dtype,
    shingle_hashes,
)
from zero2all.corpus.dedup.shingles import band_hashes, estimate_jaccard, hash_units, minhash_signatures, pack_sketches
from zero2all.corpus.dedup.shuffle import GID_DTYPE, DedupParams, load_rows, save_rows, save_sorted
from zero2all.corpus.dedup.stage import find_duplicates, find_near_duplicates, run_locally
from zero2all.corpus.document import SCHEMA, Document

PARAMS = DedupParams(source_priority=("good", "en", "zh"), partitions=4)
PROSE = re.compile(r"[\u4e00-\u9fff]|[^\W_\u4e00-\u9fff]+")
CODE = re.compile(r"\w+|[^\w\s]")


def document(content: str, source: str = "en", own_id: str = "", title: str = "") -> Document:
    category = "code" if source == "code" else ""
    return Document(make_gid(source, own_id, content), own_id, source, category, title, content, "", "")


def write_shards(root: Path, documents: Sequence[Document], count: int) -> list[Path]:
    root.mkdir(parents=True)
    paths = []
    for number in range(count):
        part = [vars(one) for one in documents[number::count]]
        paths.append(root / f"shard-{number:05}.parquet")
        pq.write_table(pa.Table.from_pylist(part, schema=SCHEMA), paths[-1], row_group_size=100)
    return paths


def plain_shingles(text: str, code: bool) -> set[tuple[str, ...]]:
    units = CODE.findall(text) if code else PROSE.findall(text.casefold())
    return set(zip(*(units[start:] for start in range(5)), strict=False))


def jaccard(one: set[Any], other: set[Any]) -> float:
    shared = len(one & other)
    return shared / max(1, len(one) + len(other) - shared)


def edit(rng: random.Random, units: list[str], share: float, words: Callable[[], str], block: bool) -> list[str]:
    """Change a share of the units: scattered, or in one block as when a section is rewritten."""
    units = list(units)
    count = max(1, round(share * len(units)))
    if block:
        start = rng.randrange(max(1, len(units) - count))
        units[start : start + count] = [words() for _ in range(count)]
        return units
    for place in rng.sample(range(len(units)), count):
        units[place] = rng.choice(["", words(), units[place] + " " + words()])
    return units


def generated(kind: str, rng: random.Random) -> tuple[Callable[[], str], str]:
    """A source of units in the manner of a language, and what stands between them."""
    if kind == "zh":
        return lambda: chr(0x4E00 + int(rng.random() ** 3 * 3000)), ""
    syllables = ["ba", "ko", "ri", "ten", "mu", "sa", "lo", "ve", "shi", "an"]
    vocabulary = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(1500)]
    marks = ["(", ")", "=", "\n    ", "+", ":", "[", "]", "."]
    if kind == "code":
        return lambda: rng.choice(vocabulary if rng.random() < 0.5 else marks), " "
    return lambda: rng.choice(vocabulary), " "


def inject_duplicates(kind: str, texts: Sequence[str], rng: random.Random) -> Iterator[Document]:
    """Every text, and for most of them a copy with 1-20% of its units edited."""
    words, between = generated(kind, rng)
    split = re.compile(r"[\u4e00-\u9fff]|[^\u4e00-\u9fff]" if kind == "zh" else r"\s+|\S+")
    for number, text in enumerate(texts):
        yield document(text, kind, f"{number}")
        if number % 5:
            share = rng.choice([0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2])
            changed = edit(rng, split.findall(text), share, lambda: between + words() + between, number % 2 == 0)
            yield document("".join(changed), kind, f"{number} again")


def measure(documents: Sequence[Document], work: Path, min_pairs: int) -> None:
    """Run everything on the documents and compare with all pairs."""
    unique = {one.gid: one for one in documents}
    sets = {gid: plain_shingles(one.content, one.data_src == "code") for gid, one in unique.items()}
    shards = write_shards(work / "in", list(unique.values()), 3)
    find_duplicates(shards, work / "out", PARAMS)
    kept_for = {}
    near = []
    for path in sorted((work / "out" / "drops").iterdir()):
        for row in pq.read_table(path).to_pylist():
            kept_for[row["gid"]] = row["kept"]
            near += [row["gid"]] if row["reason"] == "near copy" else []
    similar = [pair for pair in itertools.combinations(sets, 2) if _are_similar(sets, *pair)]
    found = [one in kept_for or other in kept_for for one, other in similar]
    right = [jaccard(sets[gid], sets[kept_for[gid]]) >= 0.7 for gid in near]
    assert not {kept_for[gid] for gid in near} & set(kept_for), "what a near duplicate was dropped for must be kept"
    assert len(similar) > min_pairs
    assert sum(found) >= 0.95 * len(found), f"{sum(found)} of {len(found)} pairs"
    assert sum(right) >= 0.99 * max(1, len(right)), f"{sum(right)} of {len(right)} near copies"


def _are_similar(sets: dict[str, set[Any]], one: str, other: str) -> bool:
    small, large = sorted((len(sets[one]), len(sets[other])))
    return small >= 5 and small >= 0.8 * large and jaccard(sets[one], sets[other]) >= 0.8


def generated_texts(kind: str, count: int, seed: int = 3) -> list[str]:
    rng = random.Random(seed)
    words, between = generated(kind, rng)
    return [between.join(words() for _ in range(int(40 + 800 * rng.random() ** 2))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["zh", "en", "code"])
def test_injected_near_duplicates_are_found_and_nothing_else(kind: str, tmp_path: Path) -> None:
    documents = list(inject_duplicates(kind, generated_texts(kind, 300), random.Random(7)))
    measure(documents, tmp_path, min_pairs=60)


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    stream = archive.extractfile(member)
    assert stream is not None
    return stream.read().decode("utf-8", "replace")


@pytest.mark.slow
def test_families_of_real_near_duplicates(shared_corpus: Path, tmp_path: Path) -> None:
    folder = shared_corpus / "dirty/near_dup"
    with tarfile.open(folder / "kafka_docs_versions_html.tar.gz") as archive:
        pages = [re.sub(r"<[^>]*>", " ", _text(archive, one)) for one in archive if one.isfile()]
    with pa.input_stream(str(folder / "frankenstein_editions.jsonl.zst"), compression="zstd") as stream:
        editions = [json.loads(line)["text"] for line in stream.read().splitlines()]
    documents = [document(text, "en", str(number)) for number, text in enumerate([*pages, *editions])]
    measure(documents, tmp_path, min_pairs=100)


def test_shingles_are_the_plain_ones() -> None:
    texts = [
        "Ｔhe quick_brown 狐狸 jumps，over the懒狗 twice",
        "",
        "a b",
        "春眠不觉晓，处处闻啼鸟。Café 42 times!",
        "𠀀𠀁𠀂𠀃𠀄𠀅",
    ]
    for text, count in zip(texts, [7, 0, 0, 9, 2], strict=True):
        hashes, counts = shingle_hashes([text], code=False, params=PARAMS)
        assert len(set(hashes.tolist())) == counts[0] == count
    together, counts = shingle_hashes(texts, code=False, params=PARAMS)
    alone = [shingle_hashes([text], code=False, params=PARAMS)[0] for text in texts]
    assert together.tolist() == np.concatenate(alone).tolist()
    assert counts.tolist() == [len(one) for one in alone]

    code = "def f(x):\n    return x_1 + 'é'  # 第一\n"
    hashes, counts = shingle_hashes([code, code.replace("    ", "\t")], code=True, params=PARAMS)
    assert counts[0] == len(CODE.findall(code)) - 4
    assert hashes[: counts[0]].tolist() == hashes[counts[0] :].tolist()


def test_width_case_and_punctuation_do_not_count_in_prose() -> None:
    one = hash_units(["Hello, World! 你好，世界 １２３"], code=False)
    other = hash_units(["hello world 你 好 世界 123"], code=False)
    assert one.hashes.tolist() == other.hashes.tolist()
    assert hash_units(["on no"], code=False).hashes.tolist() != hash_units(["no on"], code=False).hashes.tolist()


@pytest.mark.parametrize("size", [8, 40, 300, 5000])
@pytest.mark.parametrize("true", [0.3, 0.7, 0.9])
def test_signatures_estimate_jaccard(size: int, true: float) -> None:
    """Without bias, and not worse than classic MinHash, whose standard deviation is sqrt(J (1 - J) / slots)."""
    rng = np.random.default_rng(size)
    slots, tries = 112, 150
    shared = round(2 * size * true / (1 + true))
    exact = shared / (2 * size - shared)
    sets = rng.integers(0, 2**64, size=(tries, 2 * size - shared), dtype=np.uint64)
    pairs = np.concatenate([np.concatenate([row[:size], row[-size:]]) for row in sets])
    rows = minhash_signatures(pairs, np.full(2 * tries, size), slots)
    agree = (rows[::2] == rows[1::2]).mean(axis=1)
    classic = (exact * (1 - exact) / slots) ** 0.5
    assert abs(agree.mean() - exact) <= 4 * classic / tries**0.5
    assert agree.std() <= 1.15 * classic
    few = estimate_jaccard(pack_sketches(rows[::2]), pack_sketches(rows[1::2]), slots)
    assert abs(few - agree).max() < 0.15


def test_signature_does_not_depend_on_the_batch() -> None:
    texts = [*generated_texts("zh", 20), "春眠不觉晓处处闻啼鸟", "短"]
    together = minhash_signatures(*shingle_hashes(texts, code=False, params=PARAMS), 112)
    for row, text in zip(together, texts, strict=True):
        assert row.tolist() == minhash_signatures(*shingle_hashes([text], code=False, params=PARAMS), 112)[0].tolist()


def many_documents() -> list[Document]:
    parts = [inject_duplicates(kind, generated_texts(kind, 40), random.Random(2)) for kind in ("zh", "en", "code")]
    documents = [one for part in parts for one in part]
    copies = [document(one.content.upper(), "good", one.id) for one in documents[:60:7] if one.data_src != "code"]
    return documents + copies


def rows_in(directory: Path) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for path in directory.iterdir() for row in pq.read_table(path).to_pylist())


def digest_of(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_same_drops_whatever_the_shards_their_order_and_the_partitions(tmp_path: Path) -> None:
    documents = many_documents()
    shards = write_shards(tmp_path / "in", documents, 4)
    _, first = find_duplicates(shards, tmp_path / "a", PARAMS)
    assert first.dropped["exact copy"] >= 5
    assert first.dropped["near copy"] >= 20
    _, second = find_duplicates(shards[::-1], tmp_path / "b", DedupParams(**{**vars(PARAMS), "partitions": 7}))
    assert first == second
    assert digest_of(tmp_path / "a" / "drops") == digest_of(tmp_path / "b" / "drops")
    find_duplicates(write_shards(tmp_path / "one", documents, 1), tmp_path / "c", PARAMS)
    assert rows_in(tmp_path / "a" / "drops") == rows_in(tmp_path / "c" / "drops")


def test_exact_duplicates_are_dropped_by_source_priority(tmp_path: Path) -> None:
    text = "Ｆirst 春眠不觉晓\r\n second"
    good = document("first春眠 不觉晓second", "good", "2")
    documents = [document(text, "zh", "1"), good, document(text, "rest", "3")]
    code = [document("x = 1\r\ny = 2\n", "code", "4"), document("x = 1\ny = 2\n", "code", "5")]
    other = document("x=1\ny=2\n", "code", "6")
    shards = write_shards(tmp_path / "in", [*documents, *code, other], 2)
    drops, _ = find_duplicates(shards, tmp_path / "out", PARAMS)
    rows = [row for path in drops.values() for row in pq.read_table(path).to_pylist()]
    kept = {row["gid"]: row["kept"] for row in rows}
    stays, goes = sorted(one.gid for one in code)
    assert kept == {documents[0].gid: documents[1].gid, documents[2].gid: documents[1].gid, goes: stays}
    assert {row["reason"] for row in rows} == {"exact copy"}


def test_fast_nfkc_is_nfkc() -> None:
    rng = random.Random(4)
    plain = ["e", "<", "，", "春", "Ａ", "～", "…", "\u3000", "·", "\u2011", "“", "\n"]
    others = ["\u0301", "\u0338", "ﬁ", "\u1100", "\u1161", "か", "\u3099", "½", "豈", "𝒜", "ä"]
    for number in range(4000):
        text = "".join(rng.choices(plain if number % 2 else plain + others, k=rng.randint(0, 9)))
        assert nfkc(text) == unicodedata.normalize("NFKC", text), ascii(text)


def test_empty_and_tiny_documents_pass(tmp_path: Path) -> None:
    documents = [document("a b c d", "en", "1"), document("a b c e", "en", "2"), document("。", "zh", "3")]
    shards = [*write_shards(tmp_path / "in", documents, 1), *write_shards(tmp_path / "none", [], 1)]
    shards[1] = shards[1].rename(shards[1].with_name("nothing.parquet"))
    _, counts = find_duplicates(shards, tmp_path / "out", PARAMS)
    assert (counts.dropped, counts.compared) == ({"exact copy": 0, "near copy": 0}, 0)


def test_shards_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same name"):
        find_duplicates([tmp_path / "a" / "x.parquet", tmp_path / "b" / "x.parquet"], tmp_path / "out", PARAMS)


def test_injected_evaluation_text_is_found(tmp_path: Path) -> None:
    english, chinese = generated_texts("en", 30), generated_texts("zh", 30)
    questions = [" ".join(text.split()[:25]) for text in generated_texts("en", 20, seed=8)]
    exam = [text[:40] for text in generated_texts("zh", 20, seed=9)]
    build_decontamination_index(
        {"questions": [*questions, "too short"], "exam": exam, "both": exam[:1]}, tmp_path / "index"
    )
    index = load_decontamination_index(tmp_path / "index")
    assert index.names == ("both", "exam", "questions")
    assert index.too_short == (0, 0, 1)
    assert not any(find_contamination(text, index) for text in english + chinese)
    assert find_contamination(english[0] + " " + questions[3].upper().replace(" ", ", ") + ".", index) == {
        "questions": 13
    }
    assert find_contamination(chinese[0] + "。" + exam[0] + "。" + chinese[1], index) == {"both": 21, "exam": 21}
    assert find_contamination(" ".join(questions[0].split()[:12]), index) == {}
    assert find_contamination(english[0] + " ".join(questions[0].split()[:14]), index, min_hits=3) == {}

    documents = [document(text, "en", str(place)) for place, text in enumerate(english)]
    documents.append(document(f"{english[5]}\n{questions[7]}\n{english[6]}", "en", "planted"))
    shard = write_shards(tmp_path / "in", documents, 1)[0]
    found = write_contamination_drops(shard, tmp_path / "index", tmp_path / "drops.parquet")
    assert found == {"both": 0, "exam": 0, "questions": 1}
    assert pq.read_table(tmp_path / "drops.parquet")["gid"].to_pylist() == [documents[-1].gid]


@pytest.mark.parametrize("kind", ["en", "zh"])
def test_one_shared_n_gram_drops_a_note_and_not_a_book(tmp_path: Path, kind: str) -> None:
    between = " " if kind == "en" else ""
    question = (
        generated_texts(kind, 1, seed=8)[0].split() if kind == "en" else list(generated_texts(kind, 1, seed=8)[0])
    )
    n = 13 if kind == "en" else 20
    build_decontamination_index({"exam": [between.join(question[:60])]}, tmp_path / "index")
    index = load_decontamination_index(tmp_path / "index")
    book = between.join(generated_texts(kind, 40))
    note = generated_texts(kind, 1)[0][:300]
    quote, whole = between.join(question[:n]), between.join(question[:60])
    limits = {"min_hits": 8, "min_share": 0.01}
    assert find_contamination(f"{book}\n{quote}", index) == {"exam": 1}
    assert find_contamination(f"{book}\n{quote}", index, **limits) == {}
    assert find_contamination(f"{note}\n{quote}", index, **limits) == {"exam": 1}
    assert find_contamination(f"{book}\n{whole}", index, **limits) == {"exam": 60 - n + 1}


# --- near deduplication in bounded memory, against one task with all rows in memory


def gids(count: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(16 * count), GID_DTYPE)


def components_of(links: Iterable[tuple[bytes, bytes]]) -> list[set[bytes]]:
    """By joining sets, one link after the other."""
    part_of: dict[bytes, set[bytes]] = {}
    for one, other in links:
        joined = part_of.setdefault(one, {one}) | part_of.setdefault(other, {other})
        part_of |= dict.fromkeys(joined, joined)
    return list({id(part): part for part in part_of.values()}.values())


def shaped_links(shape: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(seed)
    if shape == "chain":  # the longest that so many documents can make, in any order of gids
        return np.arange(count - 1), np.arange(1, count)
    if shape == "star":
        return np.zeros(count - 1, np.int64), np.arange(1, count)
    return numbers.integers(0, count, count // 2), numbers.integers(0, count, count // 2)


@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_components_are_those_of_a_graph_library(shape: str, tmp_path: Path) -> None:
    names = gids(700, 1)
    one, other = shaped_links(shape, 700, 2)
    one, other = one[one != other], other[one != other]
    edges = both_directions(make_edges(names[one], names[other]))
    order = np.random.default_rng(3).permutation(len(edges))
    files = [tmp_path / f"{part}.npy" for part in range(3)]
    for part, path in enumerate(files):
        save_sorted(path, edges[order[part::3]], "one", "other")
    connect_components(files, tmp_path / "labels.npy")
    found = {row["one"]: row["other"] for row in load_rows(tmp_path / "labels.npy")}
    parts = components_of((names[a], names[b]) for a, b in zip(one, other, strict=True))
    expected = {gid: min(part) for part in parts for gid in part if gid != min(part)}
    assert found == expected


def write_bands(directory: Path, params: DedupParams, documents: int, shards: int, seed: int) -> list[Path]:
    """Band rows of documents of which many are near copies of others, with a chain of small changes among them."""
    numbers = np.random.default_rng(seed)
    names, paths = gids(documents, seed), []
    signatures = numbers.integers(0, 1 << 32, (documents, params.slots), np.uint32)
    for place in range(1, documents):
        if numbers.random() < 0.6:  # a copy of an earlier document with some changes
            signatures[place] = signatures[numbers.integers(max(0, place - 40), place)]
            changed = numbers.random(params.slots) < numbers.choice([0.0, 0.05, 0.15])
            signatures[place, changed] = numbers.integers(0, 1 << 32, changed.sum(), np.uint32)
    for shard in range(shards):
        mine = np.arange(shard, documents, shards)
        nodes = np.zeros(len(mine), node_dtype(params))
        nodes["gid"], nodes["rank"], nodes["shard"] = names[mine], numbers.integers(0, 3, len(mine)), shard
        nodes["sketch"] = pack_sketches(signatures[mine])
        rows = band_rows(nodes, band_hashes(signatures[mine], params.bands), params)
        paths.append(directory / f"{shard}.npy")
        save_sorted(paths[-1], rows, "hash", "rank", "gid")
    return paths


def plain_drops(bands: Sequence[Path], params: DedupParams) -> set[tuple[bytes, bytes]]:
    """The same decisions with everything in memory and no shuffle."""
    rows = np.concatenate([load_rows(path) for path in bands])
    rows = rows[np.lexsort((rows["gid"], rows["rank"], rows["hash"]))]
    leaders = cluster_by_leader(rows["hash"], rows["sketch"], params, 16)
    linked = np.flatnonzero(leaders != np.arange(len(rows)))
    parts = components_of((rows["gid"][leaders[place]], rows["gid"][place]) for place in linked)
    node_of = {row["gid"]: row for row in rows}
    drops = set()
    for part in parts:
        nodes = np.array(sorted((node_of[gid] for gid in part), key=lambda row: (row["rank"], row["gid"])), rows.dtype)
        lead = cluster_by_leader(np.zeros(len(nodes)), nodes["sketch"], params, 1024)
        drops |= {(nodes["gid"][at], nodes["gid"][lead[at]]) for at in range(len(nodes)) if lead[at] != at}
    return drops


def recorded(calls: list[tuple[str, int]]) -> Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]:
    def run(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls.append((function.__name__, len(tasks)))
        return run_locally(function, tasks)

    return run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bounded_memory_gives_the_same_drops(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero2all.corpus.dedup.shuffle.TASK_OVERHEAD_BYTES", 0)
    roomy, tight = DedupParams(partitions=1), DedupParams(partitions=1, task_bytes=100_000)
    bands = write_bands(tmp_path / "bands", roomy, 600, 4, seed)
    expected = plain_drops(bands, roomy)
    assert len(expected) > 100
    for name, params in (("roomy", roomy), ("tight", tight)):
        calls: list[tuple[str, int]] = []
        files = find_near_duplicates(bands, 600, tmp_path / name, params, recorded(calls))
        rows = np.concatenate([np.zeros(0, DROP_DTYPE), *map(load_rows, files)])
        assert {(row["gid"], row["kept"]) for row in rows} == expected
        counted = dict(calls)
        assert (counted["write_near_links"] > 20) == (name == "tight")


def test_partitions_follow_the_number_of_documents() -> None:
    params = DedupParams()
    rows = {documents: params.partitions_for(documents * params.bands, 86) for documents in (10**4, 10**7, 10**9)}
    assert rows[10**4] == 16
    for documents, partitions in rows.items():
        assert documents * params.bands * 86 * 4 / partitions <= params.task_bytes
    assert rows[10**9] == pytest.approx(100 * rows[10**7], rel=0.05)


def test_a_range_of_gids_is_read_from_an_object_store_too(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    from zero2all.base.paths import to_path
    from zero2all.corpus.dedup.shuffle import read_partition

    names = np.sort(gids(500, 5))
    edges = make_edges(names, names[::-1])
    local, remote = tmp_path / "edges.npy", to_path("memory://gid-ranges/edges.npy")
    for path in (local, remote):
        save_rows(path, edges)
    for part in range(3):
        assert np.array_equal(read_partition([local], part, 3, "one"), read_partition([remote], part, 3, "one"))
    assert sum(len(read_partition([local], part, 3, "one")) for part in range(3)) == 500
