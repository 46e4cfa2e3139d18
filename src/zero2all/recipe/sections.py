"""The types of a recipe. The docstring under each field is its help text, in the schema and in editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from zero2all.recipe.presets import PRESETS
from zero2all.units import Duration, parse_bytes, parse_count

_TEXT_OR_NUMBER = WithJsonSchema({"type": ["string", "integer", "number"]})
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1), _TEXT_OR_NUMBER]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), _TEXT_OR_NUMBER]
Span = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str), _TEXT_OR_NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]


DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class SourceRecipe(Section):
    """Where one kind of text comes from."""

    name: Slug
    """Name of the source; losses, weights and token counts are kept by it."""
    paths: list[str] = Field(min_length=1)
    """Files, directories or globs, relative to where the command runs."""
    category: str = ""
    """Written to every document of the source."""
    exclude: list[str] = []
    """Globs on the path below a given directory, such as ``test/*``."""
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


class CorpusRecipe(Section):
    """Raw files to documents."""

    sources: list[SourceRecipe] = []
    """What to read."""
    filters: list[str | dict[str, Any]] | None = None
    """Cleaning steps in order, each a name or a mapping of name and options; a sane default if not given."""
    dedup: DedupRecipe = DedupRecipe()
    decontaminate: list[str] = []
    """Files or directories of evaluation sets; documents that share long n-grams with them are dropped."""
    shard_size: Bytes = 200_000_000
    """Text bytes in one Parquet shard."""
    holdout: Fraction = 0.01
    """Share of documents kept for validation, chosen by a hash of their gid."""
    dir: Path | None = None
    """Where the documents are; ``<out>/documents`` if not given."""

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
    chop: int = Field(8, ge=0)
    """While training, cut runs of Han characters after this many, because whole clauses are hardly ever seen twice.
    Encoding does not cut them. 0 is off."""
    max_memory: Bytes = 2 * 2**30
    """Memory of all processes together. Words that do not fit are sampled without bias."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides which rare words stay where not all fit."""
    dir: Path | None = None
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
    dir: Path | None = None
    """Where the token store is; ``<out>/tokens`` if not given."""


class ModelConfig(Section):
    """The shape of the decoder. Give a preset, single fields, or a preset with some fields changed."""

    preset: str | None = None
    """A named shape; any field given beside it wins."""
    hidden_size: int = Field(192, ge=8)
    intermediate_size: int = Field(512, ge=8)
    n_layers: int = Field(7, ge=1)
    n_heads: int = Field(3, ge=1)
    n_kv_heads: int = Field(1, ge=1)
    """Fewer than ``n_heads`` is grouped-query attention."""
    head_dim: int | None = None
    """Size of one head; ``hidden_size / n_heads`` if not given."""
    context: int = Field(512, ge=8)
    """Longest sequence."""
    vocab_size: int | None = None
    """Rows of the embedding; taken from the tokenizer if not given."""
    rope_theta: Positive = 10000.0
    norm_eps: Positive = 1e-5
    qkv_bias: bool = False
    """A bias on the query, key and value projections."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys."""
    tied: bool = False
    """One matrix for embedding and output head."""
    residual_fp32: bool = True
    """Keep the residual stream in fp32 under bf16."""
    init_std: Positive = 0.02
    """Spread of the initial weights; those that write to the residual stream are scaled by depth."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("preset"), str):
            return {**PRESETS.get(name, {}), **values}
        return values

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return name

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim is None and self.hidden_size % self.n_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of n_heads ({self.n_heads})")
        if self.head_size % 2:
            raise ValueError(f"head size ({self.head_size}) must be even for rotary positions")
        return self

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.n_heads


class ParallelRecipe(Section):
    """How a model is laid over devices. This version trains in one process, so every size is 1."""

    dp_replicate: int = Field(1, ge=1)
    dp_shard: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)

    @field_validator("*")
    @classmethod
    def _one_process(cls, size: int) -> int:
        if size > 1:
            raise ValueError("this version trains in one process; leave it at 1")
        return size


class OptimizerRecipe(Section):
    """How weights are moved. Weight decay goes to matrices only, never to norms or biases."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum for the matrices inside the blocks, AdamW for the rest."""
    lr: Positive = 3e-3
    """Peak learning rate of AdamW."""
    muon_lr: Positive = 0.02
    """Peak learning rate of Muon."""
    muon_momentum: Fraction = 0.95
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: Positive = 1.0
    """Longest gradient, as a global norm."""


class ScheduleRecipe(Section):
    """Learning rate over a run: linear warmup, then a cosine down to a share of the peak."""

    warmup: Span = Duration(20, "steps")
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a share of the peak."""


class TrainRecipe(Section):
    """The run. Give its length as exactly one of steps, tokens or epochs."""

    steps: Count | None = None
    tokens: Count | None = None
    epochs: Positive | None = None
    seq_len: Count = 512
    """Tokens in one sample."""
    batch_tokens: Count = 16384
    """Tokens in one step, over all devices."""
    micro_batch_tokens: Count | None = None
    """Tokens in one forward pass; the gradient is accumulated over the rest. The whole batch if not given."""
    mixture: dict[str, Positive] = {}
    """Weight of each source. Empty means by size; a source that is not named is not used."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 means fp32 weights under autocast. auto takes it where the device computes it natively."""
    compile: bool = False
    """Compile each block with torch.compile."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    schedule: ScheduleRecipe = ScheduleRecipe()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, tokens, epochs (given: {', '.join(given) or 'none'})")
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.batch_tokens % self.seq_len:
            raise ValueError(f"batch_tokens ({self.batch_tokens}) must be a multiple of seq_len ({self.seq_len})")
        if self.micro_tokens % self.seq_len or self.batch_tokens % self.micro_tokens:
            raise ValueError(
                f"micro_batch_tokens ({self.micro_tokens}) must be a multiple of seq_len ({self.seq_len}) "
                f"and divide batch_tokens ({self.batch_tokens})"
            )
        return self

    @property
    def duration(self) -> Duration:
        if self.steps is not None:
            return Duration(self.steps, "steps")
        return Duration(self.tokens, "tokens") if self.tokens is not None else Duration(self.epochs or 0, "epochs")

    @property
    def micro_tokens(self) -> int:
        return self.micro_batch_tokens or self.batch_tokens

    @property
    def batch_samples(self) -> int:
        return self.batch_tokens // self.seq_len


class CheckpointRecipe(Section):
    """When the state of a run is kept."""

    every: Span = Duration(100, "steps")
    keep: int = Field(2, ge=1)
    """How many of the newest to keep."""


class TrackRecipe(Section):
    """What is written down and shown."""

    print_every: int = Field(10, ge=1)
    """Steps between two lines on the terminal; the record holds every step."""


class EvalsRecipe(Section):
    """How a model is judged."""

    tokens: Count = 131072
    """Held-out tokens that bits-per-byte is measured on."""
    prompts: list[str] = []
    """Openings for the samples that the quickstart prints; the beginnings of held-out documents if empty."""


class Recipe(Section):
    """Everything about a model: what it reads, what it is, how it is trained and judged."""

    name: Slug = "run"
    seed: int = Field(1234, ge=0, lt=2**63)
    out: Path = Path("runs/run")
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
        if self.train.seq_len > self.model.context:
            raise ValueError(
                f"train.seq_len ({self.train.seq_len}) is longer than model.context ({self.model.context})"
            )
        if self.model.vocab_size is not None and self.model.vocab_size < self.tokenizer.vocab_size:
            raise ValueError(
                f"model.vocab_size ({self.model.vocab_size}) is smaller than tokenizer.vocab_size "
                f"({self.tokenizer.vocab_size})"
            )
        known = {source.name for source in self.corpus.sources}
        unknown = sorted(set(self.train.mixture) - known) if known else []
        if unknown:
            raise ValueError(
                f"train.mixture names {', '.join(unknown)}, but the sources are {', '.join(sorted(known))}"
            )
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
