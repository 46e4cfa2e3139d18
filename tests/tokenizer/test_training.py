"""Word counting against the encoder's pre-tokenizer, and merging against the Hugging Face trainer."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from zero2all.base.errors import UsageError
from zero2all.base.tasks import TaskEngine
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer import train, train_tokenizer
from zero2all.tokenizer.jit import remove_stale_cache
from zero2all.tokenizer.merge import PairIndex, bytes_by_id, learn_merges, read_words
from zero2all.tokenizer.vocabulary import PATTERNS, byte_alphabet
from zero2all.tokenizer.word_count import (
    COUNTS_SCHEMA,
    AggregationLimits,
    PretokenizeConfig,
    SpillWriter,
    WordCounts,
    aggregate_counts,
)

UNUSUAL_CHARACTERS = [
    *"aZ'sSſmdt1٣²½〇々汉字⺀，éﬁKｆกᄒ😀_-\u0301\u200d\u202e\x00\U000e0001\U0010ffff\ufeff",
    *" \t\n\r\x0b\u0085\u00a0\u2028\u3000",
    *("re", "RE", "ve", "ll", "LL", "...", "  ", "\r\n"),
]


@pytest.fixture(scope="module")
def classes() -> Any:
    from zero2all.tokenizer.pretokenizer import character_classes

    return character_classes()


SPLITTERS = {name: pre_tokenizers.Split(Regex(pattern), "isolated") for name, pattern in PATTERNS.items()}


def theirs(pattern: str, text: str) -> list[str]:
    return [word for word, _ in SPLITTERS[pattern].pre_tokenize_str(text)] if text else []


def pretokenize(text: str, pattern: str, classes: Any, max_han_run: int = 0) -> list[str]:
    from zero2all.tokenizer.pretokenizer import PATTERN_RULES, han_split_end, word_end

    data = np.frombuffer(text.encode(), np.uint8)
    words: list[str] = []
    pos = 0
    while pos < data.size:
        end = word_end(data, pos, data.size, classes, *PATTERN_RULES[pattern])
        while pos < end:
            word_stop = han_split_end(data, pos, end, classes, max_han_run) if max_han_run else end
            words.append(data[pos:word_stop].tobytes().decode())
            pos = word_stop
    return words


def test_unusual_text_is_split_as_by_the_encoder(classes: Any) -> None:
    @settings(max_examples=1500, deadline=None, derandomize=True)
    @given(
        st.lists(st.one_of(st.sampled_from(UNUSUAL_CHARACTERS), st.characters(exclude_categories=["Cs"]))).map("".join)
    )
    def check(text: str) -> None:
        for pattern in PATTERNS:
            assert pretokenize(text, pattern, classes) == theirs(pattern, text), pattern

    check()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_real_text_is_split_as_by_the_encoder(pattern: str, classes: Any, shared_corpus: Path) -> None:
    for path in sorted((shared_corpus / "valid").glob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")[:150_000]
            assert pretokenize(text, pattern, classes) == theirs(pattern, text), path


def test_max_han_run_splits_only_long_runs_of_han_characters(classes: Any) -> None:
    words = pretokenize("，" + "春" * 9 + "abc" + "眠" * 4, "zh-en-code", classes, max_han_run=4)
    assert words == ["，春春春春", "春春春春", "春abc眠眠眠眠"]
    assert pretokenize("internationalisation", "zh-en-code", classes, max_han_run=4) == ["internationalisation"]


def test_invalid_utf8_is_read_within_bounds(classes: Any) -> None:
    from zero2all.tokenizer.pretokenizer import PATTERN_RULES, word_end

    rng = random.Random(3)
    for _ in range(300):
        data = np.frombuffer(rng.randbytes(rng.randint(1, 12)), np.uint8)
        pos = 0
        while pos < data.size:
            end = word_end(data, pos, data.size, classes, *PATTERN_RULES["zh-en-code"])
            assert pos < end <= data.size
            pos = end


def count(texts: list[str], work: Path, classes: Any) -> SpillWriter:
    """The spills of some texts with the default pattern, without a limit of Han runs, with the smallest table."""
    writer = SpillWriter(work / "run", PretokenizeConfig("zh-en-code", 0, 1.0), classes, memory=1 << 20)
    for start in range(0, len(texts), 100):
        batch = texts[start : start + 100]
        writer.count(pa.array(batch), np.ones(len(batch), bool))
    writer.spill()
    return writer


def add_up(
    spills: SpillWriter, work: Path, max_words: int = 1 << 40, seed: int = 0
) -> tuple[dict[bytes, int], WordCounts]:
    """At most this many words with their counts, and the record of their aggregation."""
    path = work / "words.arrow"
    limits = AggregationLimits(lambda words, size: words, max_words, table_memory=1 << 20, seed=seed)
    record = aggregate_counts(spills.paths, spills.row_count, path, limits)
    with pa.OSFile(str(path)) as stream:
        table = pa.ipc.open_file(stream).read_all()
    return dict(zip(table["word"].to_pylist(), table["count"].to_pylist(), strict=True)), record


def sentences(number: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    han = [chr(0x4E00 + n) for n in range(300)]
    return [
        "".join(rng.choices(han, k=rng.randint(1, 12))) + "，word" + str(rng.randint(0, 3000)) + " and more\n"
        for _ in range(number)
    ]


def test_counts_are_exact_however_often_the_table_is_full(tmp_path: Path, classes: Any) -> None:
    texts = sentences(40_000)
    spills = count(texts, tmp_path, classes)
    words, record = add_up(spills, tmp_path)
    assert len(spills.paths) > 2
    assert words == Counter(word.encode() for text in texts for word in theirs("zh-en-code", text))
    assert record.threshold == 1


def test_a_word_larger_than_the_table_is_counted(tmp_path: Path, classes: Any) -> None:
    long = "x" * 3_000_000
    words, _ = add_up(count(["a b", long, long + " b", ""], tmp_path, classes), tmp_path)
    assert words == {b"a": 1, b" b": 2, long.encode(): 2}


def test_sampling_respects_the_limit_and_is_unbiased(tmp_path: Path, classes: Any) -> None:
    spills = count(sentences(8_000), tmp_path, classes)
    truth, _ = add_up(spills, tmp_path)
    max_words, rounds = len(truth) // 4, 10
    estimates = Counter[bytes]()
    for seed in range(rounds):
        words, record = add_up(spills, tmp_path, max_words, seed)
        assert max_words / 2.5 < len(words) <= max_words
        assert record.threshold > 1
        assert all(count >= record.threshold for count in words.values())
        assert all(words[word] == count for word, count in truth.items() if count >= record.threshold)
        estimates.update(words)
    # Of the rare words together: some 15,000, each kept with probability 1/8, give a deviation of 0.7%.
    rare = [word for word, number in truth.items() if number == 1]
    assert sum(estimates[word] for word in rare) / rounds == pytest.approx(len(rare), rel=0.03)


def hf_merges(words: Iterable[str], size: int, min_frequency: int, split: str | None = None) -> list[tuple[str, str]]:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=min_frequency, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer = HFTokenizer(models.BPE())
    splitter = [pre_tokenizers.Split(Regex(split), "isolated")] if split else [pre_tokenizers.WhitespaceSplit()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.train_from_iterator(words, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def our_merges(
    counts: dict[bytes, int], size: int, min_frequency: int, work: Path, ids: int = 1 << 16
) -> list[tuple[str, str]]:
    """``ids`` is how many the symbols of the words must be able to tell apart."""
    path = work / "counted.arrow"
    with pa.ipc.new_file(str(path), COUNTS_SCHEMA) as file:
        table = [pa.array(list(counts), pa.large_binary()), pa.array(list(counts.values()), pa.int64())]
        file.write_batch(pa.record_batch(table, schema=COUNTS_SCHEMA))
    tokens = [bytes([byte]) for byte in bytes_by_id()]
    merges = learn_merges(read_words(path, ids), tokens, size, min_frequency)
    character = {byte: character for character, byte in byte_alphabet().items()}
    names = ["".join(character[byte] for byte in token) for token in tokens]
    return [(names[left], names[right]) for left, right, _ in merges]


def test_merges_of_unusual_words_equal_those_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    """Few letters and many repetitions: ties, runs such as aaaa, and tokens that arise in two ways."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.lists(st.text("abc", min_size=1, max_size=14), min_size=1, max_size=60), st.integers(1, 3))
    def check(words: list[str], min_frequency: int) -> None:
        counts = Counter(word.encode() for word in words)
        assert our_merges(counts, 330, min_frequency, tmp_path) == hf_merges(words, 330, min_frequency)

    check()


@pytest.mark.parametrize("max_pairs", [1 << 19, pytest.param(64, marks=pytest.mark.long)])
def test_merges_of_real_text_equal_those_of_the_hugging_face_trainer(
    max_pairs: int, tmp_path: Path, classes: Any, shared_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the index holds few pairs at a time and is rebuilt repeatedly."""
    monkeypatch.setattr("zero2all.tokenizer.merge.MAX_INDEXED_PAIRS", max_pairs)
    floors = []
    build = PairIndex._build
    monkeypatch.setattr(PairIndex, "_build", lambda index: (build(index), floors.append(index.floor)))
    texts = [path.read_text(encoding="utf-8")[:400_000] for path in sorted((shared_corpus / "valid").glob("*.*"))]
    counts, _ = add_up(count(texts, tmp_path, classes), tmp_path)
    ours = our_merges(counts, 4000, 2, tmp_path)
    first = list(floors)
    assert len(ours) == 4000 - 256
    assert ours == our_merges(counts, 4000, 2, tmp_path, ids=1 << 17)
    assert ours == hf_merges(texts, 4000, 2, PATTERNS["zh-en-code"])
    assert max_pairs > 64 or (len(first) > 3 and first == sorted(first, reverse=True))


def test_counts_beyond_32_bits(tmp_path: Path) -> None:
    merges = our_merges({b"ab": 2**40, b"bc": 2**33, b"cd": 2**33 + 1}, 258, 2, tmp_path)
    assert merges == [("a", "b"), ("c", "d")]


def test_memory_of_merging_is_within_the_estimate() -> None:
    """With random words, which have the most distinct pairs."""
    script = """
import resource, sys
import numpy as np
from zero2all.tokenizer.merge import bytes_by_id, learn_merges, merge_memory
from zero2all.tokenizer.pair_index import new_words
def learn(words):
    rng = np.random.default_rng(1)
    lengths = rng.integers(4, 28, words)
    symbols = rng.integers(0, 256, int(lengths.sum())).astype(np.int32)
    counted = new_words(symbols, lengths, rng.integers(1, 9, words))
    learn_merges(counted, [bytes([byte]) for byte in bytes_by_id()], 2000, 2)
    unit = 1 if sys.platform == 'darwin' else 1024
    return merge_memory(words, symbols.size), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
_, before = learn(10)
estimate, peak = learn(2_000_000)
print(estimate, peak - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=250)
    estimate, taken = map(int, ran.stdout.split())
    assert taken <= estimate


def shards(root: Path, number: int, seed: int = 0) -> Path:
    """Documents as the corpus stage leaves them, made by hand."""
    from zero2all.base.manifest import checksums, write_manifest

    (root / "train").mkdir(parents=True)
    names, size = [], 0
    for shard in range(number):
        texts = sentences(2500, seed=seed * 100 + shard)
        size += sum(len(text.encode()) for text in texts)
        gids = [f"{random.Random(text).getrandbits(128):032x}" for text in texts]
        names.append(f"s-{shard:05}.parquet")
        pq.write_table(pa.table({"gid": gids, "content": texts}), root / "train" / names[-1])
    splits = {"train": {"s": {"shards": names, "bytes": size}}, "valid": {}}
    write_manifest(root, "documents", {"key": "k", "splits": splits, "files": checksums(root)})
    return root


RECIPE = TokenizerRecipe(vocab_size=1024, train_bytes=700_000)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("shards") / "documents", 6)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that words are sampled, as they are when a corpus is large."""
    monkeypatch.setattr("zero2all.tokenizer.train.merge_memory", heavy_words)


def heavy_words(words: int, symbols: int) -> int:
    return words << 20


@pytest.fixture(scope="module")
def expected(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The vocabulary that one process trains without interruption."""
    out = tmp_path_factory.mktemp("one") / "tokenizer"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero2all.tokenizer.train.merge_memory", heavy_words)
        manifest = train_tokenizer(RECIPE, documents, out)
    assert manifest.counted.threshold > 1
    assert 0 < manifest.trained_on_bytes < 1_000_000
    return (out / "tokenizer.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_number_of_workers_changes_no_byte(workers: int, documents: Path, expected: bytes, tmp_path: Path) -> None:
    train_tokenizer(RECIPE, documents, tmp_path / "many", TaskEngine(workers=workers))
    assert (tmp_path / "many/tokenizer.json").read_bytes() == expected


DYING = """
import os, signal, sys
from pathlib import Path
from tests.tokenizer.test_training import RECIPE, heavy_words
from zero2all.tokenizer import train
train.merge_memory = heavy_words
def dies_in(name, after):
    real, calls = getattr(train, name), []
    def dying(*args, **options):
        calls.append(1)
        if len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    setattr(train, name, dying)
dies_in(sys.argv[1], int(sys.argv[2]))
train.train_tokenizer(RECIPE, Path(sys.argv[3]), Path(sys.argv[4]))
"""


@pytest.mark.slow
# The first call of the last two is on a tiny text, to compile them.
@pytest.mark.parametrize(("where", "after"), [("count_shard", 3), ("aggregate_counts", 1), ("learn_merges", 1)])
def test_after_a_kill_the_same_call_resumes_to_the_same_bytes(
    where: str, after: int, documents: Path, expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [where, str(after), str(documents), str(tmp_path / "killed")]
    killed = subprocess.run([sys.executable, "-c", DYING, *arguments], timeout=200)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    counted_again: list[int] = []
    real = train.count_shard
    monkeypatch.setattr(train, "count_shard", lambda *a, **b: counted_again.append(1) or real(*a, **b))
    train_tokenizer(RECIPE, documents, tmp_path / "killed")
    assert (tmp_path / "killed/tokenizer.json").read_bytes() == expected
    assert len(counted_again) == (3 if where == "count_shard" else 0)


def test_another_vocabulary_size_does_not_count_again(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_tokenizer(RECIPE, documents, tmp_path / "out")
    monkeypatch.delattr(train, "count_shard")
    larger = RECIPE.model_copy(update={"vocab_size": 1088})
    assert train_tokenizer(larger, documents, tmp_path / "out").vocab_size == 1088


def test_too_little_memory_for_the_workers_says_what_is_enough(documents: Path, tmp_path: Path) -> None:
    small = RECIPE.model_copy(update={"max_memory": 1 << 30})
    with pytest.raises(UsageError, match="fewer --workers"):
        train_tokenizer(small, documents, tmp_path / "out", TaskEngine(workers=16))


# --- compiled code


def test_a_compiled_cache_of_another_version_is_removed(tmp_path: Path) -> None:
    """numba would unpickle it, and fail on a class that was renamed since."""
    source, cache = tmp_path / "word_table.py", tmp_path / "__pycache__"
    cache.mkdir()
    for path, seconds in ((cache / "stale.nbi", 100), (source, 200), (cache / "current.nbi", 300)):
        path.touch()
        os.utime(path, (seconds, seconds))
    remove_stale_cache(tmp_path)
    assert [path.name for path in cache.iterdir()] == ["current.nbi"]


def test_only_training_imports_numba() -> None:
    script = """
import sys
from zero2all.tokenizer import Tokenizer
assert "numba" not in sys.modules
from zero2all.tokenizer import train_tokenizer
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
