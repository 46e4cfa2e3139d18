"""How raw files become documents: sources, filters, duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator

from zero2all.base.conversation import SourceKind
from zero2all.base.plugins import PluginSpec
from zero2all.recipe.source_names import SourceName
from zero2all.recipe.types import AnyDir, Bytes, Count, Fraction, InputPath, Mistake, PluginChoice, Section

DOCUMENT_FIELDS = ("id", "category", "title", "content", "desc")


class TakeRecipe(Section):
    """A part of a source, by number of files."""

    files: Count
    """Number of files, chosen by a hash of their paths. An added file replaces at most one of them. Raise it for more
    text: the files chosen so far stay in."""


class SourceRecipe(Section):
    """A named source of text."""

    _OMITTED = frozenset({"reader"})

    name: SourceName
    """Name of the source, in any script, without ``/``, ``\\``, ``@`` and control characters. Losses, mixture weights
    and token counts are recorded under it. Use one source for each kind of text that you weight or measure by
    itself."""
    paths: list[InputPath] = Field(min_length=1)
    """Files, directories, globs or URLs to read, relative to the working directory. Add paths here only for text of the
    same kind."""
    kind: SourceKind = "text"
    """What the records are: ``text``; ``chat`` for conversations (OpenAI, ShareGPT, Alpaca, MOSS); ``preference`` for
    preference pairs, a chosen and a rejected completion (DPO); ``rating`` for completions with a label (KTO). All but
    text are tokenized through the chat template of the tokenizer. Set it to what ``train.objective.name`` trains on."""
    reader: PluginSpec | None = None
    """Reader of all files: a built-in format such as csv, the name of an installed plugin, or ``module:function``,
    alone or as a mapping with ``name`` and options. Set it for a format that zero2all does not know. Default: detected
    from content and file name."""
    category: str = ""
    """Category of documents that have none of their own. Set it to ``code`` if filters take program text for prose."""
    exclude: list[str] = []
    """Globs of files to skip, matched against the path relative to a given directory, such as ``test/*``. Add a glob
    for files that should not be trained on."""
    take: TakeRecipe | Annotated[float, Field(gt=0, le=1)] | None = None
    """Part of the source to use: ``{files: 20}`` reads 20 of its files, ``0.25`` keeps a quarter of its documents. A
    hash of the path or of the content decides which. The rest is counted as ``not taken``. Set it for a trial on less
    text. Default: everything."""
    follow_links: bool = False
    """Follow symbolic links that point outside the given paths. Otherwise they are skipped and counted. Turn it on for
    data that you trust, such as a Hugging Face cache."""
    fields: dict[str, str] = {}
    """Mapping of document fields to record fields, such as ``content: body``. Fields that are not listed are found by
    their usual names. With ``kind: chat``, ``content`` names the list of messages. Set it if the build finds no text,
    or the wrong field."""
    mapping: str | None = None
    """Name of a built-in field mapping, such as ``alpaca``; ``fields`` overrides it. Set it if ``z2a corpus sniff``
    prints one for your files."""

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
    """Also remove near-duplicates, found by MinHash over n-grams. Turn it on for web text, which repeats itself."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Minimum Jaccard similarity between the n-grams of near-duplicates. Raise it if the report shows that different
    documents were dropped. Lower it only slightly: most pairs below 0.7 are not found."""


class ContaminationRecipe(Section):
    """How much text from an evaluation set a document may contain. An n-gram is 13 words, or 20 Chinese characters."""

    min_hits: int = Field(8, ge=1)
    """Drop a document that shares at least this many distinct n-grams with an evaluation set. Raise it if the report
    shows that long documents were dropped for a quotation."""
    min_share: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Drop a document if at least this fraction of its n-grams is in an evaluation set. This catches short texts that
    quote one question. Raise it if the report shows that good short documents were dropped."""


class CorpusRecipe(Section):
    """How raw files become documents."""

    sources: list[SourceRecipe] = []
    """Sources to read."""
    filters: list[Annotated[PluginSpec, PluginChoice("filter")]] | None = None
    """Filters in order, each a name, or a mapping with ``name`` and options. Default: the built-in list. Set it if the
    report shows that a filter drops good documents, or that bad ones remain."""
    dedup: DedupRecipe = DedupRecipe()
    """Which documents count as duplicates."""
    decontaminate: list[InputPath] = []
    """Files or directories with evaluation sets; documents that share long n-grams with them are dropped. Add every set
    that you will evaluate on."""
    contamination: ContaminationRecipe = ContaminationRecipe()
    """How much text from an evaluation set a document may contain."""
    shard_size: Bytes = 200_000_000
    """Bytes of text in one Parquet shard. Lower it if workers of ``z2a tokenizer train`` or ``z2a tokens build`` have
    no shard to work on."""
    holdout: Fraction = 0.01
    """Fraction of documents in the validation split, chosen by gid. Their near-duplicates are removed from the training
    set. In a source with too few documents, the fraction is taken from inside long ones. Lower it for a very large
    corpus, and raise it if there is no validation text."""
    dir: AnyDir | None = None
    """Directory of the documents, local or in an object store such as ``s3://bucket/documents``. Set it if machines
    share no disk, or several workspaces use the same documents. Default: ``<out>/documents``."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, sources: list[SourceRecipe]) -> list[SourceRecipe]:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources share the name {', '.join(twice)}")
        return sources
