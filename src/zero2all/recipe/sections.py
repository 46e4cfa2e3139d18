"""The types of a recipe. The docstring under each field is its help text, in the schema and in editors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, field_validator

from zero2all.base.plugins import PluginSpec
from zero2all.base.units import Duration
from zero2all.base.workspace import DEFAULT_RUN, MAX_NAME_PARTS, is_unsearched
from zero2all.recipe.corpus import CorpusRecipe
from zero2all.recipe.model import ModelConfig
from zero2all.recipe.parallel import ParallelRecipe, parallel_mistakes
from zero2all.recipe.source_names import SourceName
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import (
    AnyDir,
    Bytes,
    Count,
    DurationField,
    InputPath,
    LocalDir,
    Mistake,
    PluginChoice,
    Section,
)

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


class TokenizerRecipe(Section):
    """How the tokenizer is trained."""

    vocab_size: Count = 8192
    """Vocabulary size including special tokens and padding; a multiple of 64. Raise it for more languages or a larger
    model, and lower it if embedding and head outweigh the blocks."""
    trainer: Literal["zero2all", "sentencepiece-bpe", "sentencepiece-unigram"] = "zero2all"
    """Trainer: ``zero2all`` for byte-level BPE in bounded memory, or BPE or unigram of the package sentencepiece, with
    byte fallback. The package trains on as much text as fits into ``max_memory``. Change it if another program needs a
    sentencepiece model."""
    pattern: str = "zh-en-code"
    """Pre-tokenizer that splits text into words: ``zh-en-code``, ``qwen2``, ``gpt2``, or your own regular expression,
    which must match every character and take linear time. Only for the trainer ``zero2all``, as ``min_frequency`` and
    ``max_han_run`` are. Change it to split numbers or another script differently."""
    special_tokens: list[str] = []
    """Additional special tokens, such as ``<think>``. They are never produced from text. Add those that your chat
    template needs before you train the tokenizer."""
    min_frequency: int = Field(2, ge=1)
    """A pair is merged only if it occurs at least this often. Raise it if a small corpus fills the vocabulary with rare
    tokens."""
    train_bytes: Bytes = 10_000_000_000
    """Bytes of text to train on, sampled evenly from the documents of all sources. Lower it to save time, and raise it
    if small sources compress badly."""
    max_han_run: int = Field(16, ge=0)
    """Split runs of Han characters after this many characters, because whole clauses rarely repeat. This affects
    training only, not encoding. Set it to 0, which disables it, to learn the same merges as Hugging Face's trainer."""
    max_memory: Bytes = 2 * 2**30
    """Memory limit for all processes together. Words that do not fit are sampled without bias. Raise it for more
    workers, or for more text with sentencepiece."""
    dir: LocalDir | None = None
    """Directory of the tokenizer. Default: ``<out>/tokenizer``. Set it to use an imported tokenizer, or one of another
    workspace."""

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
    """Fraction of documents that are encoded again with the reference backend, and decoded, to verify each shard. Raise
    it if you doubt a fast backend; a change builds all tokens again."""
    dir: LocalDir | None = None
    """Directory of the token store. Default: ``<out>/tokens``. Set it to a local disk if ``data_wait`` is high, or for
    a second tokenizer in the workspace."""


class CheckpointRecipe(Section):
    """When and where checkpoints are written."""

    every: DurationField = Duration(100, "steps")
    """Interval of durable checkpoints, which are written in the background. Lower it to lose less after a failure, and
    raise it if writing takes longer than the interval."""
    flash_every: DurationField | None = Duration(10, "steps")
    """Interval of in-memory (flash) checkpoints, for restarts without durable storage; null disables them. Raise it if
    ``checkpoint_stall`` is a large part of the time, or replicas take longer to send."""
    flash_dir: LocalDir = Path("/dev/shm")
    """Directory of in-memory checkpoints: a tmpfs with space for two checkpoints of every rank on the machine. Change
    it if ``/dev/shm`` is too small."""
    replicas: int = Field(1, ge=0, le=2)
    """Number of other nodes that also keep each in-memory checkpoint, so that a lost node costs a few steps; none on a
    single node. Each one costs memory for two more checkpoints of every rank. Raise it to survive two lost nodes, and
    lower it if memory is short."""
    replica_rate: Bytes | None = None
    """Maximum bytes per second that a node sends for replicas, such as ``500MB``; null: no limit. Set it if replicas
    slow the steps down."""
    keep_latest: int = Field(2, ge=1)
    """Number of newest checkpoints to keep. Raise it if ``z2a eval watch`` is slower than training, and lower it if the
    disk fills up."""
    keep_every: DurationField | None = None
    """Interval of checkpoints that are kept forever. Set it to compare them later, or to go back to one."""
    keep_best: int = Field(0, ge=0)
    """Number of best checkpoints to keep, by validation bits-per-byte measured at the same step. Raise it if a run may
    overfit; ``evals.every`` must be set."""
    dir: AnyDir | None = None
    """Directory of the checkpoints, shared by all machines, or an object store such as ``s3://bucket/run``. A run with
    another directory than ``<out>/run`` has its own below it, such as ``s3://bucket/run/deeper``. Default:
    ``<out>/<run>/checkpoints``. Set it if the disk of ``out`` is small or not shared."""


class TrackRecipe(Section):
    """What is recorded and logged."""

    log_every: int = Field(10, ge=1)
    """Number of steps between log lines; the run record has every step. Raise it if steps are short."""
    sinks: list[Annotated[PluginSpec, PluginChoice("sink")]] = []
    """Additional trackers: tensorboard, wandb, package.module:Class, or the name of an installed plugin, each alone or
    as a mapping with ``name`` and options. Its module is imported, so treat a recipe from somebody else as code. Add
    one if your team compares runs there."""
    layer_norms_every: int | None = Field(100, ge=1)
    """Number of steps between records of the gradient norm of every layer; null disables them. Lower it to find the
    layer in which gradients grow."""


class EvalsRecipe(Section):
    """How a model is evaluated."""

    _OMITTED = frozenset({"benchmarks"})

    tokens: Count = 131072
    """Number of validation tokens that bits-per-byte is measured on. Raise it if the error (±) exceeds the differences
    that you look for."""
    every: DurationField | None = None
    """Interval of validation during training. Default: none; the quickstart validates at the end. Set it to see whether
    the model overfits, and for ``checkpoint.keep_best``."""
    benchmarks: list[Annotated[PluginSpec, PluginChoice("task")]] = []
    """Benchmarks of ``z2a eval bench`` and ``z2a eval watch`` if they are called without any: each a built-in one, the
    name of an installed plugin, or ``module:function``, alone or as a mapping with ``name`` and options. Default: all
    built-in ones whose files are there. Set it to evaluate every run in the same way."""
    test_sets: dict[SourceName, InputPath] = {}
    """Texts besides the validation set that each validation measures bits-per-byte on, such as
    ``{wiki: data/wiki.jsonl}``: by name, a file, a directory, a glob or a URL in any format of a source. Add text that
    no source has, and little of it: it is scored in full."""
    prompts: list[str] = []
    """Prompts for the samples that validation records and the quickstart prints; three are used. Default: the
    beginnings of validation documents. Set it to follow the model on your own prompts."""
    stories: int = Field(0, ge=0)
    """Number of stories that each validation generates without a prompt and checks, in place of ``prompts``. Set it
    only for a model that is trained on the built-in stories."""


class Recipe(Section):
    """Everything about a run: data, model, parallelism, training and evaluation."""

    name: Name = DEFAULT_RUN
    """Name of the recipe, also in exports; a reference curve is found by it. Set it in every recipe of your own."""
    run: RunName = DEFAULT_RUN
    """Directory of the run below ``out``. Runs below one ``out`` share its documents, tokenizer and tokens. Change it
    for each further run, as ``z2a train --name`` does together with ``name``."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Seed for the initial weights, the sample order, dropout and sampling. Change it only to measure the noise between
    runs."""
    out: LocalDir = Path("runs/run")
    """Output directory of every stage, unless its section sets another. Change it for another corpus."""
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
