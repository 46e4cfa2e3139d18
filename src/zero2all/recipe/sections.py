"""The types of a recipe. The docstring under each field is its help text, in the schema and in editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from zero2all.conversation import SourceKind
from zero2all.recipe.model import ModelConfig
from zero2all.recipe.parallel import ParallelRecipe, parallel_mistakes
from zero2all.recipe.source_names import SourceName
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import (
    AnyDir,
    Bytes,
    Count,
    DurationField,
    Fraction,
    InputPath,
    LocalDir,
    Mistake,
    Section,
)
from zero2all.units import Duration
from zero2all.workspace import DEFAULT_RUN, MAX_NAME_PARTS, is_unsearched

SPECIAL_TOKEN = re.compile(r"<[^\s<>]{1,62}>|\[[^\s\[\]]{1,62}\]")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # what sentencepiece calls a byte
NAME_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
NAME_PATTERN = rf"^{NAME_PART}(/{NAME_PART}){{0,{MAX_NAME_PARTS - 1}}}$"


def _check_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"must be letters, digits, '_', '-' and '.', in at most {MAX_NAME_PARTS} parts separated by '/' that begin "
            "with a letter, a digit or '_'"
        )
    return name


def _check_run_name(name: str) -> str:
    """Beside the directories of stages, and with ``checkpoint.dir`` beside the checkpoints of the default run."""
    for part in name.split("/"):
        if is_unsearched(part) or re.fullmatch(r"step-\d+", part):
            raise ValueError(f"must not have the part {part!r}, which names the output of a stage or a checkpoint")
    return name


Name = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]
RunName = Annotated[Name, AfterValidator(_check_run_name)]
PATTERN_NAMES = ("zh-en-code", "qwen2", "gpt2")
DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")


class TakeRecipe(Section):
    """A part of a source, by number of files."""

    files: Count
    """Number of files, chosen by a hash of their paths. An added file replaces at most one of them."""


class SourceRecipe(Section):
    """A named source of text."""

    name: SourceName
    """Name of the source, in any script, without ``/``, ``\\``, ``@`` and control characters. Losses, mixture weights
    and token counts are recorded under it."""
    paths: list[InputPath] = Field(min_length=1)
    """Files, directories, globs or URLs to read, relative to the working directory."""
    kind: SourceKind = "text"
    """What the records are: ``text``; ``chat`` for conversations (OpenAI, ShareGPT, Alpaca, MOSS); ``preference`` for
    pairs of a chosen and a rejected answer (DPO); ``rating`` for answers with a label (KTO). All but text are tokenized
    through the chat template of the tokenizer."""
    category: str = ""
    """Category of every document of the source."""
    exclude: list[str] = []
    """Globs of files to skip, matched against the path relative to a given directory, such as ``test/*``."""
    take: TakeRecipe | Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of the source to use: ``{files: 20}`` reads 20 of its files, ``0.25`` keeps a quarter of its documents. A
    hash of the path or of the content decides which. The rest is counted as ``not taken``. Default: everything."""
    follow_links: bool = False
    """Follow symbolic links that point outside the given paths. Otherwise they are skipped and counted."""
    fields: dict[str, str] = {}
    """Mapping of document fields to record fields, such as ``content: body``. Fields that are not listed are found by
    their usual names. With ``kind: chat``, ``content`` names the list of messages."""
    mapping: str | None = None
    """Name of a built-in field mapping, such as ``alpaca``; ``fields`` overrides it. See ``z2a corpus sniff``."""

    @field_validator("take", mode="before")
    @classmethod
    def _files_or_fraction(cls, take: Any) -> Any:
        if isinstance(take, str | list) or (isinstance(take, int | float) and not 0 < take <= 1):
            raise ValueError("must be a fraction up to 1 of the documents, or a number of files such as {files: 20}")
        return take

    def mistakes(self) -> Iterator[Mistake]:
        if self.kind != "text" and self.mapping is not None:
            yield Mistake("mapping is for kind: text; messages are found by their shape", ("mapping", "kind"))
        if self.kind in ("preference", "rating") and "content" in self.fields:
            yield Mistake("fields.content is for kind: text and chat", ("fields", "kind"))
        if self.kind == "chat" and "{" in self.fields.get("content", ""):
            yield Mistake("fields.content of kind: chat names one field, the list of messages", ("fields", "kind"))

    @field_validator("fields")
    @classmethod
    def _known_document_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(fields) - set(DOCUMENT_FIELDS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: a document has {', '.join(DOCUMENT_FIELDS)}")
        return fields


class DedupRecipe(Section):
    """Which documents count as duplicates. The copy from the source listed first in the recipe is kept.

    Documents that differ only in case, character width or white space (code: only in line endings) always do.
    """

    near: bool = False
    """Also remove near-duplicates, found by MinHash over n-grams."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum Jaccard similarity between the n-grams of near-duplicates."""


class ContaminationRecipe(Section):
    """How much text from an evaluation set a document may contain. An n-gram is 13 words, or 20 Chinese characters."""

    min_hits: int = Field(8, ge=1)
    """Drop a document that shares at least this many distinct n-grams with an evaluation set."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Drop a document if at least this fraction of its n-grams is in an evaluation set. This catches short texts that
    quote one question."""


class CorpusRecipe(Section):
    """How raw files become documents."""

    sources: list[SourceRecipe] = []
    """Sources to read."""
    filters: list[str | dict[str, Any]] | None = None
    """Filters in order, each a name, or a mapping with ``name`` and options. Default: the built-in list."""
    dedup: DedupRecipe = DedupRecipe()
    """Which documents count as duplicates."""
    decontaminate: list[InputPath] = []
    """Files or directories with evaluation sets; documents that share long n-grams with them are dropped."""
    contamination: ContaminationRecipe = ContaminationRecipe()
    """How much text from an evaluation set a document may contain."""
    shard_size: Bytes = 200_000_000
    """Bytes of text in one Parquet shard."""
    holdout: Fraction = 0.01
    """Fraction of documents in the validation split, chosen by gid. Their near-duplicates are removed from the training
    set. In a source with too few documents, the fraction is taken from inside long ones."""
    dir: AnyDir | None = None
    """Directory of the documents, local or in an object store such as ``s3://bucket/documents``. Default:
    ``<out>/documents``."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: list[SourceRecipe]) -> list[SourceRecipe]:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources share the name {', '.join(twice)}")
        return sources


class TokenizerRecipe(Section):
    """How the tokenizer is trained."""

    vocab_size: Count = 8192
    """Vocabulary size including special tokens and padding; a multiple of 64."""
    trainer: Literal["zero2all", "sentencepiece-bpe", "sentencepiece-unigram"] = "zero2all"
    """Trainer: ``zero2all`` for byte-level BPE in bounded memory, or BPE or unigram of the package sentencepiece, with
    byte fallback, on as much text as fits into ``max_memory``."""
    pattern: str = "zh-en-code"
    """Pre-tokenizer that splits text into words: ``zh-en-code``, ``qwen2``, ``gpt2``, or your own regular expression.
    That must match every character and take linear time; both are checked before training. Only for the trainer
    ``zero2all``, as ``min_frequency`` and ``max_han_run`` are."""
    special_tokens: list[str] = []
    """Additional special tokens, such as ``<think>``. They are never produced from text."""
    min_frequency: int = Field(2, ge=1)
    """A pair is merged only if it occurs at least this often."""
    train_bytes: Bytes = 10_000_000_000
    """Bytes of text to train on, sampled evenly from the documents of all sources."""
    max_han_run: int = Field(16, ge=0)
    """Split runs of Han characters after this many characters, because whole clauses rarely repeat. This affects
    training only, not encoding. 0 disables it."""
    max_memory: Bytes = 2 * 2**30
    """Memory limit for all processes together. Words that do not fit are sampled without bias."""
    dir: LocalDir | None = None
    """Directory of the tokenizer. Default: ``<out>/tokenizer``."""

    @field_validator("special_tokens")
    @classmethod
    def _marked_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not SPECIAL_TOKEN.fullmatch(name) or not name.isprintable() or BYTE_TOKEN.fullmatch(name):
                raise ValueError(
                    f"{name!r} must be like <name> or [name], of at most 64 characters, without spaces: "
                    "text without the marks must never be taken for a special token by other programs"
                )
        if len(set(names)) < len(names):
            raise ValueError("a name is given twice")
        return names

    def mistakes(self) -> Iterator[Mistake]:
        if self.trainer != "zero2all" and self.has_own_pattern:
            yield Mistake(
                "pattern needs trainer: zero2all, because sentencepiece splits text by its own rules",
                ("pattern", "trainer"),
            )

    @property
    def has_own_pattern(self) -> bool:
        """Whether ``pattern`` is a regular expression, not the name of one."""
        return self.pattern not in PATTERN_NAMES

    @field_validator("pattern")
    @classmethod
    def _name_or_expression(cls, pattern: str) -> str:
        if re.fullmatch(r"[\w-]*", pattern) and pattern not in PATTERN_NAMES:
            raise ValueError(
                f"must be {', '.join(PATTERN_NAMES)}, or a regular expression that matches every character"
            )
        return pattern

    @field_validator("max_memory")
    @classmethod
    def _enough_memory(cls, size: int) -> int:
        if size < 2**30:
            raise ValueError("must be at least 1GiB: Python and its libraries take a part of that")
        return size

    @field_validator("vocab_size")
    @classmethod
    def _multiple_of_64(cls, size: int) -> int:
        if size < 320:
            raise ValueError("must be at least 320: 256 bytes, the special tokens, and something to learn")
        if size % 64:
            raise ValueError(f"must be a multiple of 64 so that GPUs stay fast; the next one is {-(-size // 64) * 64}")
        return size


class TokensRecipe(Section):
    """How documents are tokenized."""

    verify: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Fraction of documents that are encoded again with the reference backend, and decoded, to verify each shard."""
    dir: LocalDir | None = None
    """Directory of the token store. Default: ``<out>/tokens``."""


class CheckpointRecipe(Section):
    """When and where checkpoints are written."""

    every: DurationField = Duration(100, "steps")
    """Interval of durable checkpoints, which are written in the background."""
    flash_every: DurationField | None = Duration(10, "steps")
    """Interval of in-memory (flash) checkpoints, for restarts without durable storage; null disables them."""
    flash_dir: LocalDir = Path("/dev/shm")
    """Directory of in-memory checkpoints: a tmpfs with space for two checkpoints of every rank on the machine."""
    replicas: int = Field(1, ge=0, le=2)
    """Number of other nodes that also keep each in-memory checkpoint, so that a lost node costs a few steps; none on a
    single node. Each one costs memory for two more checkpoints of every rank."""
    replica_rate: Bytes | None = None
    """Bytes per second that a node sends for replicas at most, such as ``500MB``; null: no limit."""
    keep_latest: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: DurationField | None = None
    """Interval of checkpoints that are kept forever."""
    keep_best: int = Field(0, ge=0)
    """Number of best checkpoints to keep, by validation bits-per-byte measured at the same step."""
    dir: AnyDir | None = None
    """Directory of the checkpoints, shared by all machines, or an object store such as ``s3://bucket/run``. A run with
    another directory than ``<out>/run`` has its own below it, such as ``s3://bucket/run/deeper``. Default:
    ``<out>/<run>/checkpoints``."""


class TrackRecipe(Section):
    """What is recorded and logged."""

    log_every: int = Field(10, ge=1)
    """Number of steps between log lines; the run record has every step."""
    sinks: list[str] = []
    """Additional trackers: tensorboard, wandb, or package.module:Class. That module is imported, so treat a recipe from
    somebody else as code."""
    layer_norms_every: int | None = Field(100, ge=1)
    """Number of steps between records of the gradient norm of every layer; null disables them."""


class EvalsRecipe(Section):
    """How a model is evaluated."""

    tokens: Count = 131072
    """Number of validation tokens that bits-per-byte is measured on."""
    every: DurationField | None = None
    """Interval of validation during training. Default: none; the quickstart validates at the end."""
    test_sets: dict[SourceName, InputPath] = {}
    """Texts besides the validation set that each validation measures bits-per-byte on, such as
    ``{wiki: data/wiki.jsonl}``: by name, a file, a directory, a glob or a URL in any format of a source. They are
    scored in full, so keep them small."""
    prompts: list[str] = []
    """Prompts for the samples that validation records and the quickstart prints. Default: the beginnings of validation
    documents."""
    stories: int = Field(0, ge=0)
    """Number of stories that each validation generates without a prompt and checks, in place of ``prompts``: for a
    model that is trained on the built-in stories."""


class Recipe(Section):
    """Everything about a run: data, model, parallelism, training and evaluation."""

    name: Name = DEFAULT_RUN
    """Name of the recipe; a reference curve is found by it."""
    run: RunName = DEFAULT_RUN
    """Directory of the run below ``out``. Runs below one ``out`` share its documents, tokenizer and tokens.
    ``z2a train --name`` sets it together with ``name``."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Seed for the initial weights and the sample order."""
    out: LocalDir = Path("runs/run")
    """Output directory of every stage, unless its section sets another."""
    corpus: CorpusRecipe = CorpusRecipe()
    """How raw files become documents."""
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    """How the tokenizer is trained."""
    tokens: TokensRecipe = TokensRecipe()
    """How documents are tokenized."""
    model: ModelConfig = ModelConfig()
    """The model architecture."""
    parallel: ParallelRecipe = ParallelRecipe()
    """How the model is parallelized."""
    train: TrainRecipe = TrainRecipe(epochs=1)
    """How the model is trained."""
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    """When and where checkpoints are written."""
    track: TrackRecipe = TrackRecipe()
    """What is recorded and logged."""
    evals: EvalsRecipe = EvalsRecipe()
    """How the model is evaluated."""

    def mistakes(self) -> Iterator[Mistake]:
        for length, keys in self.train.keys_by_seq_len().items():
            if length > self.model.max_position_embeddings:
                yield Mistake(
                    f"train.seq_len ({length}) is longer than "
                    f"model.max_position_embeddings ({self.model.max_position_embeddings})",
                    (*keys, "model.max_position_embeddings"),
                )
        known = {source.name for source in self.corpus.sources}
        stages = self.train.resolved_stages()
        unknown = sorted({name for stage in stages for name in stage.mixture} - known) if known else []
        if unknown:
            mixtures = [f"train.stages.{number}.mixture" for number in range(len(stages))]
            yield Mistake(
                f"train.mixture names {', '.join(unknown)}, but the sources are {', '.join(sorted(known))}",
                (*mixtures, "train.mixture", "corpus.sources"),
            )
        size, is_trained = self.model.vocab_size, self.tokenizer.dir is None  # one that exists has its own size
        if is_trained and size is not None and size < self.tokenizer.vocab_size:
            yield Mistake(
                f"model.vocab_size ({self.model.vocab_size}) is smaller than tokenizer.vocab_size "
                f"({self.tokenizer.vocab_size})",
                ("model.vocab_size", "tokenizer.vocab_size", "tokenizer.dir"),
            )
        if self.model.lora is not None and self.train.init is None:
            yield Mistake(
                "model.lora trains adapters of a pretrained model: set train.init", ("model.lora", "train.init")
            )
        yield from parallel_mistakes(self.model, self.train, self.parallel)

    @property
    def documents_dir(self) -> Path:
        return self.corpus.dir or self.out / "documents"

    @property
    def tokenizer_dir(self) -> Path:
        return self.tokenizer.dir or self.out / "tokenizer"

    @property
    def tokens_dir(self) -> Path:
        return self.tokens.dir or self.out / "tokens"

    @property
    def run_dir(self) -> Path:
        return self.out / self.run

    @property
    def checkpoint_dir(self) -> Path | None:
        """The directory of checkpoints outside the run's own; no two runs below ``out`` have the same."""
        directory = self.checkpoint.dir
        return directory if directory is None or self.run == DEFAULT_RUN else directory / self.run
