"""``z2a tokenizer train``: count the words of the training documents, then learn merges from the counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders as hf_decoders

from zero2all.base.console import progress
from zero2all.base.directory_lock import lock_output
from zero2all.base.errors import UsageError
from zero2all.base.io import (
    MANIFEST,
    atomic_dir,
    atomic_path,
    fingerprint,
    read_json,
    require_replaceable,
    write_record,
)
from zero2all.base.manifest import checksums, is_current, read_documents_manifest, read_finished, write_manifest
from zero2all.base.records import DocumentsManifest, parse_record
from zero2all.base.tasks import TaskEngine, available_cores, shutdown_workers
from zero2all.base.units import show_bytes, show_count
from zero2all.recipe import TokenizerRecipe
from zero2all.tokenizer.hf_directory import write_hf_directory
from zero2all.tokenizer.manifest import KIND, LearnedVocabulary, TokenizerManifest, TrainedTokenizer, is_other_tokenizer
from zero2all.tokenizer.merge import Merge, bytes_by_id, learn_merges, merge_memory, read_words
from zero2all.tokenizer.pattern_check import check_pattern
from zero2all.tokenizer.pretokenizer import character_classes
from zero2all.tokenizer.sentencepiece_vocabulary import train_sentencepiece
from zero2all.tokenizer.vocabulary import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    NAMED_TOKENS,
    PAD,
    PATTERNS,
    SPECIAL_TOKENS,
    START_OF_TEXT,
    UNKNOWN,
    byte_alphabet,
    reserved_tokens,
)
from zero2all.tokenizer.word_count import (
    HASH_PARTITIONS,
    AggregationLimits,
    PretokenizeConfig,
    SpillWriter,
    WordCounts,
    aggregate_counts,
    count_shard,
    read_finished_count,
)

FORMAT = 2
SAMPLING_SEED = 0  # of the rare words that are kept if not all fit into memory
TOKEN_ROLES = {"bos_token": START_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD}
PROCESS_MEMORY = 300 << 20  # of a process before it counts anything: Python, Arrow, numba, one batch of documents
MIN_TABLE_MEMORY, MAX_TABLE_MEMORY = 32 << 20, 512 << 20


@dataclass(frozen=True)
class CountedWords:
    """The record of ``words.arrow``: its key, the bytes of text, and the fields of ``WordCounts``."""

    key: str
    bytes: int
    words: int
    different_words: int
    kept_words: int
    threshold: int


def train_tokenizer(
    recipe: TokenizerRecipe,
    documents: Path,
    out: Path,
    engine: TaskEngine | None = None,
    before_replace: Callable[[], None] = lambda: None,
) -> TrainedTokenizer:
    """Learn a vocabulary from the training split in ``documents``; ``out`` becomes a Hugging Face directory.

    Intermediate results are in ``<out>.work``; after an interruption, the same call resumes from there.
    ``before_replace`` is called before another tokenizer in ``out`` is replaced, and may raise.
    """
    with lock_output(out, "tokenizer training"):
        return _train_tokenizer(recipe, documents, out, engine or TaskEngine(), before_replace)


def _train_tokenizer(
    recipe: TokenizerRecipe, documents: Path, out: Path, engine: TaskEngine, before_replace: Callable[[], None]
) -> TrainedTokenizer:
    corpus = read_documents_manifest(documents)
    key = fingerprint([FORMAT, corpus.key, recipe.model_dump(mode="json", exclude={"dir"})])
    if is_current(out, KIND, key):
        return parse_record(TrainedTokenizer, {**read_json(out / MANIFEST), "reused": True}, out / MANIFEST)

    require_replaceable(out, KIND)
    if _has_other_vocabulary(out, recipe):  # fail now, not after an hour of counting
        before_replace()
    special = _special_tokens(recipe)
    if recipe.trainer != "zero2all":
        learned = train_sentencepiece(recipe, documents, corpus, special)
    else:
        learned = _train_bpe(recipe, documents, corpus, special, out.with_name(f"{out.name}.work"), engine)
    with atomic_dir(out, KIND) as unfinished:
        write_hf_directory(unfinished, learned.definition, TOKEN_ROLES, CHAT_TEMPLATE, learned.model)
        manifest = TokenizerManifest(
            key=key,
            vocab_size=learned.num_learned + len(learned.special_tokens),
            learned=learned.num_learned,
            special_tokens=learned.special_tokens,
            pattern=_pattern_name(recipe),
            trained_on_bytes=learned.trained_on_bytes,
            counted=learned.counted,
            files=checksums(unfinished),
        )
        write_manifest(unfinished, KIND, asdict(manifest))
        if is_other_tokenizer(out, unfinished):
            before_replace()
    return TrainedTokenizer(**vars(manifest), reused=False)


def _pattern_name(recipe: TokenizerRecipe) -> str:
    return recipe.pattern if recipe.trainer == "zero2all" else recipe.trainer


def _special_tokens(recipe: TokenizerRecipe) -> tuple[str, ...]:
    """Special tokens that every vocabulary has, the recipe's own, and reserved names if these are few."""
    known = {*NAMED_TOKENS, *reserved_tokens(recipe.vocab_size), UNKNOWN}
    if taken := known.intersection(recipe.special_tokens):
        raise UsageError(f"tokenizer.special_tokens: every vocabulary has {', '.join(sorted(taken))}: remove it there")
    special = (*NAMED_TOKENS, *recipe.special_tokens)
    special += reserved_tokens(len(SPECIAL_TOKENS) - len(special))
    if recipe.vocab_size <= 256 + len(special):
        raise UsageError(
            f"tokenizer.vocab_size ({recipe.vocab_size}) leaves no room beside {len(special)} special tokens"
        )
    return special


def _train_bpe(
    recipe: TokenizerRecipe,
    documents: Path,
    corpus: DocumentsManifest,
    special: tuple[str, ...],
    work: Path,
    engine: TaskEngine,
) -> LearnedVocabulary:
    """Byte-level BPE in bounded memory."""
    if recipe.has_own_pattern:
        with progress("checking the pattern"):
            check_pattern(recipe.pattern)
    table = _count_words(recipe, documents, corpus, work, engine)
    tokens = [bytes([byte]) for byte in bytes_by_id()]
    wanted = recipe.vocab_size - len(special)
    with progress(f"learning {wanted} tokens from {show_count(table.kept_words)} words", wanted - 256) as advance:
        merges = learn_merges(read_words(work / "words.arrow", wanted), tokens, wanted, recipe.min_frequency, advance)
    # The model relies on the size, so a text too small to fill it leaves reserved names for later use.
    named = (*NAMED_TOKENS, *recipe.special_tokens)
    special = named + reserved_tokens(recipe.vocab_size - len(tokens) - len(named))
    pattern = PATTERNS.get(recipe.pattern, recipe.pattern)
    counted = WordCounts(table.words, table.different_words, table.kept_words, table.threshold)
    definition = _byte_level_definition(pattern, tokens, merges, special)
    return LearnedVocabulary(definition, list(special), len(tokens), table.bytes, counted, None)


def _has_other_vocabulary(directory: Path, recipe: TokenizerRecipe) -> bool:
    """Whether the tokenizer in a directory certainly differs from the one that the recipe gives."""
    path = directory / MANIFEST
    if not path.exists():
        return False
    before = read_json(path)
    if "imported_from" in before or "extends" in before:
        raise UsageError(
            f"{directory} has an imported or extended tokenizer, which training would replace: "
            "choose another tokenizer.dir, or use it as it is with 'z2a tokens build'"
        )
    return (before.get("vocab_size"), before.get("pattern")) != (recipe.vocab_size, _pattern_name(recipe))


def _byte_level_definition(pattern: str, tokens: list[bytes], merges: list[Merge], special: tuple[str, ...]) -> bytes:
    """``tokenizer.json``."""
    character = {byte: character for character, byte in byte_alphabet().items()}
    names = ["".join(character[byte] for byte in token) for token in tokens]
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = HFTokenizer(
        models.BPE(vocab=vocabulary, merges=[(names[merge.left], names[merge.right]) for merge in merges])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = hf_decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return str(tokenizer.to_str(pretty=True)).encode()


def _count_words(
    recipe: TokenizerRecipe, documents: Path, corpus: DocumentsManifest, work: Path, engine: TaskEngine
) -> CountedWords:
    """Stage one: ``words.arrow`` in ``work``, and its record."""
    sources = corpus.splits["train"].values()
    available = sum(part.bytes for part in sources)
    share = min(1.0, recipe.train_bytes / available) if available else 0.0
    config = PretokenizeConfig(recipe.pattern, recipe.max_han_run, share)
    counts, classes = work / "counts", work / "classes.npy"
    names = [f"train/{shard}" for part in sources for shard in part.shards]
    keys = [fingerprint([FORMAT, corpus.files[name], vars(config)]) for name in names]
    key = fingerprint([keys, SAMPLING_SEED, recipe.max_memory])
    done = work / "words.json"
    if (before := read_finished(CountedWords, done, key)) is not None:
        return before
    done.unlink(missing_ok=True)

    table_memory = _memory_per_table(recipe.max_memory, engine)
    with progress("preparing (the first time on a machine takes a minute)"):
        _write_character_classes(classes)
        warm_up_jit(work / "compile", np.load(classes))
    shards = [
        (documents / name, counts / Path(name).stem, of_shard) for name, of_shard in zip(names, keys, strict=True)
    ]
    records = {shard: record for shard in shards if (record := read_finished_count(*shard[1:]))}
    todo = [shard for shard in shards if shard not in records]
    tasks = [(*shard, config, classes, table_memory) for shard in todo]
    expected = share * available
    left = expected - sum(record.bytes for record in records.values())
    with progress(f"counting the words of {show_bytes(expected)}", expected) as advance:
        advance(expected - left)
        if engine.in_process:
            made = engine.run(partial(count_shard, advance=advance), tasks)
        else:
            made = engine.run(count_shard, tasks, lambda task: advance(left / len(tasks)))
    records |= dict(zip(todo, made, strict=True))
    shutdown_workers()  # their memory is needed now

    in_order = [records[shard] for shard in shards]
    spills = [counts / spill for record in in_order for spill in record.runs]
    rows = sum(record.rows for record in in_order)
    with progress(f"adding up {show_count(rows)} counts", HASH_PARTITIONS) as advance:
        budget = recipe.max_memory - PROCESS_MEMORY
        limits = AggregationLimits(merge_memory, budget, min(MAX_TABLE_MEMORY, budget // 4), SAMPLING_SEED)
        table = aggregate_counts(spills, rows, work / "words.arrow", limits, advance)
    words = CountedWords(key, sum(record.bytes for record in in_order), **vars(table))
    write_record(done, words)
    shutil.rmtree(counts)
    return words


def _write_character_classes(path: Path) -> None:
    """Computed once, and read by every worker."""
    with atomic_path(path) as unfinished, open(unfinished, "wb") as stream:
        np.save(stream, character_classes())


def warm_up_jit(stem: Path, classes: NDArray[np.uint8]) -> None:
    """Run every JIT function once here, so that workers load them from the cache instead of compiling them too."""
    spills = SpillWriter(stem, PretokenizeConfig("zh-en-code", 8, 1.0), classes, MIN_TABLE_MEMORY)
    spills.count(pa.array(["a text, a text"]), np.ones(1, bool))
    spills.spill()
    words = stem.with_suffix(".arrow")
    limits = AggregationLimits(merge_memory, budget=1 << 40, table_memory=MIN_TABLE_MEMORY)
    aggregate_counts(spills.paths, spills.row_count, words, limits)
    learn_merges(read_words(words, 260), [bytes([byte]) for byte in bytes_by_id()], 260, 2)
    for path in (*spills.paths, words):
        path.unlink()


def _memory_per_table(max_memory: int, engine: TaskEngine) -> int:
    """Memory for the table of one task, so that all processes together stay below the limit."""
    workers = engine.workers if engine.kind == "local" else available_cores()
    others = 0 if engine.in_process else PROCESS_MEMORY
    memory = (max_memory - others) // workers - PROCESS_MEMORY
    if memory < MIN_TABLE_MEMORY:
        required = others + workers * (PROCESS_MEMORY + MIN_TABLE_MEMORY)
        raise UsageError(
            f"tokenizer.max_memory ({show_bytes(max_memory)}) is too little for {workers} workers: "
            f"give at least {show_bytes(required)}, or fewer --workers"
        )
    return min(MAX_TABLE_MEMORY, memory)
