"""The types of a recipe. The docstring under each field is its help text, in the schema and in editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from zero2all.paths import RemotePath, credentials_problem, is_url, to_path
from zero2all.recipe.model import ModelConfig
from zero2all.recipe.parallel import ParallelRecipe, parallel_problems
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import Bytes, Count, DurationField, Fraction, Positive, Section, Slug
from zero2all.redact import redact
from zero2all.units import Duration


def _require_local(path: Any) -> Any:
    if isinstance(path, str) and is_url(path):
        raise ValueError("must be a local directory; in an object store there can be sources and corpus.dir")
    return path


def _refuse_credentials(url: Any) -> Any:
    if isinstance(url, str) and (problem := credentials_problem(url)):
        raise ValueError(problem)
    return url


def _local_or_remote(path: Any) -> Any:
    found = to_path(_refuse_credentials(path)) if isinstance(path, str) else path
    if isinstance(found, RemotePath) and len(found.parts) < 3:
        raise ValueError(f"needs a name below the bucket, such as {found}/documents")
    return found


LocalDir = Annotated[Path, BeforeValidator(_require_local)]
AnyDir = Annotated[Path, BeforeValidator(_local_or_remote)]
# A password in the URL of a text is used to read it; it is not written into the recipe of a run, nor shown.
InputPath = Annotated[str, BeforeValidator(_refuse_credentials), PlainSerializer(redact, when_used="json")]
DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")


class SourceRecipe(Section):
    """Where one kind of text comes from."""

    name: Slug
    """Name of the source. Losses, mixture weights and token counts are recorded under it."""
    paths: list[InputPath] = Field(min_length=1)
    """Files, directories, globs or URLs to read, relative to the working directory."""
    category: str = ""
    """Category of every document of the source."""
    exclude: list[str] = []
    """Globs of files to skip, matched with the path below a given directory, such as ``test/*``."""
    follow_links: bool = False
    """Follow symbolic links that lead out of the paths. Otherwise they are counted and skipped."""
    fields: dict[str, str] = {}
    """Record field for each document field, such as ``content: body``. Fields that are not given are found by their
    usual names."""
    mapping: str | None = None
    """Name of a built-in field mapping, such as ``alpaca``; ``fields`` override it. See ``z2a corpus sniff``."""

    @field_validator("fields")
    @classmethod
    def _known_document_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(fields) - set(DOCUMENT_FIELDS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: a document has {', '.join(DOCUMENT_FIELDS)}")
        return fields


class DedupRecipe(Section):
    """Which documents count as the same; the copy of the source named first in the recipe is kept.

    Documents that are equal but for case, width and white space (code: but for line ends) always do.
    """

    near: bool = False
    """Remove near-duplicates too, by MinHash over n-grams."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Jaccard similarity of n-grams from which two documents are near-duplicates."""
    boilerplate: bool = False
    """Remove lines that occur in many documents of a source, such as footers."""


class ContaminationRecipe(Section):
    """How much text of an evaluation set a document may hold. An n-gram is 13 words, or 20 Chinese characters."""

    min_hits: int = Field(8, ge=1)
    """A document that shares at least this many distinct n-grams with an evaluation set is dropped."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """A document is dropped if at least this fraction of its n-grams is in an evaluation set, such as a short text that
    quotes one question."""


class CorpusRecipe(Section):
    """How raw files become documents."""

    sources: list[SourceRecipe] = []
    """Sources to read."""
    filters: list[str | dict[str, Any]] | None = None
    """Filters in order, each a name or a mapping of its name to its options. Default: the built-in list."""
    dedup: DedupRecipe = DedupRecipe()
    """Which documents count as duplicates."""
    decontaminate: list[InputPath] = []
    """Files or directories of evaluation sets; documents that share long n-grams with them are dropped."""
    contamination: ContaminationRecipe = ContaminationRecipe()
    """How much text of an evaluation set a document may hold."""
    shard_size: Bytes = 200_000_000
    """Bytes of text in one Parquet shard."""
    holdout: Fraction = 0.01
    """Fraction of documents in the validation split, chosen by a hash of their gid. Near-duplicates of them are never
    trained on."""
    dir: AnyDir | None = None
    """Where the documents are: a directory, or a place in an object store such as ``s3://bucket/documents``;
    ``<out>/documents`` if not given."""

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
    """Rows of the vocabulary, special tokens and padding included; a multiple of 64."""
    pattern: Literal["zh-en-code", "qwen2", "gpt2"] = "zh-en-code"
    """Name of the pre-tokenizer pattern."""
    min_frequency: int = Field(2, ge=1)
    """A pair is merged only if it occurs at least this often."""
    train_bytes: Bytes = 10_000_000_000
    """Bytes of text to train on, sampled evenly from the documents of all sources."""
    max_han_run: int = Field(16, ge=0)
    """In training only, split runs of Han characters after this many, because whole clauses hardly ever repeat.
    Encoding does not split them. 0 is off."""
    max_memory: Bytes = 2 * 2**30
    """Memory limit of all processes together. Words that do not fit are sampled without bias."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the sampling of rare words where not all fit into memory."""
    dir: LocalDir | None = None
    """Where the tokenizer is; ``<out>/tokenizer`` if not given."""

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
    """Fraction of documents that the reference backend encodes again, and decodes, before a shard is published."""
    dir: LocalDir | None = None
    """Where the token store is; ``<out>/tokens`` if not given."""


class CheckpointRecipe(Section):
    """When and where checkpoints are written."""

    every: DurationField = Duration(100, "steps")
    """How often a checkpoint is written to durable storage, in the background."""
    flash_every: DurationField | None = Duration(10, "steps")
    """How often an in-memory (flash) checkpoint is taken, for restarts on the same machines; null is never."""
    flash_dir: LocalDir = Path("/dev/shm")
    """Directory of in-memory checkpoints: a tmpfs with space for two checkpoints of every rank on the machine."""
    keep_latest: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: DurationField | None = None
    """Interval in steps, tokens or epochs at which a checkpoint is kept forever."""
    keep_best: int = Field(0, ge=0)
    """Number of best checkpoints to keep, by validation bits-per-byte measured at the same step."""
    dir: AnyDir | None = None
    """Where checkpoints are written: a directory that every machine sees, or a place such as ``s3://bucket/run``;
    ``<out>/run/checkpoints`` if not given."""


class TrackRecipe(Section):
    """What is recorded and logged."""

    log_every: int = Field(10, ge=1)
    """Steps between two log lines; the record holds every step."""
    sinks: list[str] = []
    """Other trackers to write to as well: tensorboard, wandb, or package.module:Class. That module is imported, so
    treat a recipe from somebody else as code."""
    system_every: Positive = 10.0
    """Seconds between two readings of CPU, memory and GPU."""
    layer_norms_every: int | None = Field(100, ge=1)
    """Steps between two records of the gradient norm of every layer; null for none."""


class EvalsRecipe(Section):
    """How a model is evaluated."""

    tokens: Count = 131072
    """Number of validation tokens that bits-per-byte is measured on."""
    every: DurationField | None = None
    """How often training is validated. Default: only at the end of a quickstart."""
    prompts: list[str] = []
    """Prompts of the samples that validation records and the quickstart prints. Default: the beginnings of validation
    documents."""


class Recipe(Section):
    """Everything about a model: its data, its shape, how it is trained and evaluated."""

    name: Slug = "run"
    """Name of the run."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Seed of initial weights and sample order."""
    out: LocalDir = Path("runs/run")
    """Output directory of every stage, unless its section sets another."""
    corpus: CorpusRecipe = CorpusRecipe()
    """How raw files become documents."""
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    """How the tokenizer is trained."""
    tokens: TokensRecipe = TokensRecipe()
    """How documents are tokenized."""
    model: ModelConfig = ModelConfig()
    """The shape of the model."""
    parallel: ParallelRecipe = ParallelRecipe()
    """The parallelism of the model."""
    train: TrainRecipe = TrainRecipe(epochs=1)
    """How the model is trained."""
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    """When and where checkpoints are written."""
    track: TrackRecipe = TrackRecipe()
    """What is recorded and logged."""
    evals: EvalsRecipe = EvalsRecipe()
    """How the model is evaluated."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        longest = max(stage.seq_len for stage in self.train.resolved_stages())
        if longest > self.model.max_position_embeddings:
            raise ValueError(
                f"train.seq_len ({longest}) is longer than "
                f"model.max_position_embeddings ({self.model.max_position_embeddings})"
            )
        if self.model.vocab_size is not None and self.model.vocab_size < self.tokenizer.vocab_size:
            raise ValueError(
                f"model.vocab_size ({self.model.vocab_size}) is smaller than tokenizer.vocab_size "
                f"({self.tokenizer.vocab_size})"
            )
        known = {source.name for source in self.corpus.sources}
        mixed = {name for stage in self.train.resolved_stages() for name in stage.mixture}
        unknown = sorted(mixed - known) if known else []
        if unknown:
            raise ValueError(
                f"train.mixture names {', '.join(unknown)}, but the sources are {', '.join(sorted(known))}"
            )
        if problems := parallel_problems(self.model, self.train, self.parallel):
            raise ValueError("; ".join(problems))
        return self

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
        return self.out / "run"
