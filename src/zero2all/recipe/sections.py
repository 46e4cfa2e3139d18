"""The types of a recipe. The docstring under each field is its help text, in the schema and in editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from zero2all.masking import mask
from zero2all.paths import RemotePath, is_url, to_path, url_problem
from zero2all.recipe.model import ModelConfig
from zero2all.recipe.parallel import ParallelRecipe, layout_problems
from zero2all.recipe.training import TrainRecipe
from zero2all.recipe.types import Bytes, Count, Fraction, Positive, Section, Slug, Span
from zero2all.units import Duration


def _local(path: Any) -> Any:
    if isinstance(path, str) and is_url(path):
        raise ValueError("must be a local directory; in an object store there can be sources and corpus.dir")
    return path


def _no_keys(url: Any) -> Any:
    if isinstance(url, str) and (problem := url_problem(url)):
        raise ValueError(problem)
    return url


def _anywhere(path: Any) -> Any:
    found = to_path(_no_keys(path)) if isinstance(path, str) else path
    if isinstance(found, RemotePath) and len(found.parts) < 3:
        raise ValueError(f"needs a name below the bucket, such as {found}/documents")
    return found


LocalDir = Annotated[Path, BeforeValidator(_local)]
AnyDir = Annotated[Path, BeforeValidator(_anywhere)]
# A password in the URL of a text is used to read it; it is not written into the recipe of a run, nor shown.
Readable = Annotated[str, BeforeValidator(_no_keys), PlainSerializer(mask, when_used="json")]
DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")


class SourceRecipe(Section):
    """Where one kind of text comes from."""

    name: Slug
    """Name of the source; losses, weights and token counts are kept by it."""
    paths: list[Readable] = Field(min_length=1)
    """Files, directories or globs, relative to where the command runs."""
    category: str = ""
    """Written to every document of the source."""
    exclude: list[str] = []
    """Globs on the path below a given directory, such as ``test/*``."""
    follow_links: bool = False
    """Read what symbolic links inside the paths lead to outside of them; they are counted and left out otherwise."""
    fields: dict[str, str] = {}
    """For records: which of their fields becomes which of ours. What is not named is found by its usual names."""
    mapping: str | None = None
    """A ready mapping by its name, such as ``alpaca``; ``fields`` go over it. See ``z2a corpus sniff``."""

    @field_validator("fields")
    @classmethod
    def _ours_exist(cls, fields: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(fields) - set(DOCUMENT_FIELDS))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: a document has {', '.join(DOCUMENT_FIELDS)}")
        return fields


class DedupRecipe(Section):
    """Which documents count as the same; the copy of the source named first in the recipe is kept.

    Documents that are equal but for case, width and white space (code: but for line ends) always do.
    """

    near: bool = False
    """Alike by MinHash over n-grams."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of common n-grams (Jaccard) from which two documents are near-duplicates."""
    boilerplate: bool = False
    """Take out lines that stand in many documents of a source, such as footers."""


class ContaminationRecipe(Section):
    """How much text of an evaluation set a document may hold. An n-gram is 13 words, or 20 Chinese characters."""

    min_hits: int = Field(8, ge=1)
    """A document that shares so many different n-grams with a set is dropped, however long it is,"""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """and so is one of whose own n-grams this share is in a set: a short text that quotes one question."""


class CorpusRecipe(Section):
    """Raw files to documents."""

    sources: list[SourceRecipe] = []
    """What to read."""
    filters: list[str | dict[str, Any]] | None = None
    """Cleaning steps in order, each a name or a mapping of name and options; a sane default if not given."""
    dedup: DedupRecipe = DedupRecipe()
    decontaminate: list[Readable] = []
    """Files or directories of evaluation sets; documents that share long n-grams with them are dropped."""
    contamination: ContaminationRecipe = ContaminationRecipe()
    shard_size: Bytes = 200_000_000
    """Text bytes in one Parquet shard."""
    holdout: Fraction = 0.01
    """Share of documents kept for validation, chosen by a hash of their gid. Near copies of them never train."""
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
    """Documents to a vocabulary."""

    vocab_size: Count = 8192
    """Rows of the vocabulary, special tokens and padding included; a multiple of 64."""
    pattern: Literal["zh-en-code", "qwen2", "gpt2"] = "zh-en-code"
    """How text is cut before merges are learned."""
    min_frequency: int = Field(2, ge=1)
    """A pair seen less often is never merged."""
    sample: Bytes = 10_000_000_000
    """Train on about this much text, drawn evenly from the documents of every source."""
    chop: int = Field(16, ge=0)
    """While training, cut runs of Han characters after this many, because whole clauses are hardly ever seen twice.
    Encoding does not cut them. 0 is off."""
    max_memory: Bytes = 2 * 2**30
    """Memory of all processes together. Words that do not fit are sampled without bias."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides which rare words stay where not all fit."""
    dir: LocalDir | None = None
    """Where the tokenizer is; ``<out>/tokenizer`` if not given."""

    @field_validator("max_memory")
    @classmethod
    def _room_for_python(cls, size: int) -> int:
        if size < 2**30:
            raise ValueError("must be at least 1GiB: Python and its libraries take a part of that")
        return size

    @field_validator("vocab_size")
    @classmethod
    def _tensor_core_shape(cls, size: int) -> int:
        if size < 320:
            raise ValueError("must be at least 320: 256 bytes, the special tokens, and something to learn")
        if size % 64:
            raise ValueError(f"must be a multiple of 64 so that GPUs stay fast; the next one is {-(-size // 64) * 64}")
        return size


class TokensRecipe(Section):
    """Documents to a token store."""

    verify: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of documents encoded again by the reference encoder, and decoded, before a shard is published."""
    dir: LocalDir | None = None
    """Where the token store is; ``<out>/tokens`` if not given."""


class CheckpointRecipe(Section):
    """When the state of a run is kept, and where."""

    every: Span = Duration(100, "steps")
    """How often on durable storage, in the background."""
    flash_every: Span | None = Duration(10, "steps")
    """How often in memory that outlives the process, for restarts on the same machines; null is never."""
    flash_dir: LocalDir = Path("/dev/shm")
    """A tmpfs with room for two states of every rank on the machine."""
    keep: int = Field(2, ge=1)
    """How many of the newest to keep."""
    keep_every: Span | None = None
    """Those of every so many steps, tokens or epochs are kept for good."""
    keep_best: int = Field(0, ge=0)
    """How many of the best to keep, by bits-per-byte of held-out text, where that was measured at the same step."""
    dir: AnyDir | None = None
    """Where they are: a directory that every machine sees, or a place such as ``s3://bucket/run``;
    ``<out>/run/checkpoints`` if not given."""


class TrackRecipe(Section):
    """What is written down and shown."""

    print_every: int = Field(10, ge=1)
    """Steps between two lines on the terminal; the record holds every step."""
    sinks: list[str] = []
    """Other trackers to write to as well: tensorboard, wandb, or package.module:Class. That module is imported, so
    treat a recipe from somebody else as code."""
    system_every: Positive = 10.0
    """Seconds between two readings of CPU, memory and GPU."""


class EvalsRecipe(Section):
    """How a model is judged."""

    tokens: Count = 131072
    """Held-out tokens that bits-per-byte is measured on."""
    every: Span | None = None
    """How often ``z2a train`` measures it on the way; only at the end of a quickstart if not given."""
    prompts: list[str] = []
    """Openings for the samples that the quickstart prints; the beginnings of held-out documents if empty."""


class Recipe(Section):
    """Everything about a model: what it reads, what it is, how it is trained and judged."""

    name: Slug = "run"
    seed: int = Field(1234, ge=0, lt=2**63)
    out: LocalDir = Path("runs/run")
    """Where every stage puts its directory, unless its section names another."""
    corpus: CorpusRecipe = CorpusRecipe()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    tokens: TokensRecipe = TokensRecipe()
    model: ModelConfig = ModelConfig()
    parallel: ParallelRecipe = ParallelRecipe()
    train: TrainRecipe = TrainRecipe(epochs=1)
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    track: TrackRecipe = TrackRecipe()
    evals: EvalsRecipe = EvalsRecipe()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        longest = max(stage.seq_len for stage in self.train.resolved_stages())
        if longest > self.model.context:
            raise ValueError(f"train.seq_len ({longest}) is longer than model.context ({self.model.context})")
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
        if problems := layout_problems(self):
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
