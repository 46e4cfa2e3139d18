"""``z2a tokenizer import`` and ``export``: tokenizers of others as directories that every stage uses like our own, and
ours in tiktoken's format.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from zero2all.base.errors import Z2aError
from zero2all.base.io import atomic_dir, fingerprint, read_json_object, read_regular, write_json, write_text
from zero2all.base.manifest import checksums, write_manifest
from zero2all.tokenizer.backends import parity_texts
from zero2all.tokenizer.hf_directory import write_hf_directory
from zero2all.tokenizer.manifest import KIND, ImportedTokenizer, is_other_tokenizer
from zero2all.tokenizer.sentencepiece_model import MODEL_FILE, read_model, to_tokenizer_json
from zero2all.tokenizer.tokenizer import Tokenizer, named_tokens, read_template


@dataclass(frozen=True)
class _Source:
    definition: bytes
    """``tokenizer.json``."""
    named_tokens: dict[str, str]
    chat_template: str | None
    model: bytes | None
    """``tokenizer.model``, if ``tokenizer.json`` is made from it."""


def import_tokenizer(source: Path, out: Path, before_replace: Callable[[], None] = lambda: None) -> ImportedTokenizer:
    """Make ``out`` a tokenizer directory of a sentencepiece ``.model`` or of a Hugging Face directory.

    Fails if text does not decode to itself, or if ``source`` is a sentencepiece model, the package is installed, and
    the ids differ from the package's. ``before_replace`` is called before another tokenizer in ``out`` is
    replaced, and may raise.
    """
    found = _read_source(source)
    with atomic_dir(out, KIND) as partial:
        write_hf_directory(partial, found.definition, found.named_tokens, found.chat_template, found.model)
        try:
            tokenizer = Tokenizer(partial)
            compared = _check(tokenizer, source, found.model)
        except Z2aError as error:
            raise Z2aError(str(error).replace(str(partial), str(source))) from error
        manifest = ImportedTokenizer(
            key=fingerprint([tokenizer.fingerprint, found.named_tokens, found.chat_template]),
            imported_from=source.name,
            vocab_size=tokenizer.vocab_size,
            special_tokens=list(tokenizer.special_ids),
            compared_with_sentencepiece=compared,
            files=checksums(partial),
        )
        write_manifest(partial, KIND, asdict(manifest))
        if is_other_tokenizer(out, partial):
            before_replace()
    return manifest


def _read_source(source: Path) -> _Source:
    """A directory's ``tokenizer.json`` comes first: it is what transformers uses."""
    directory = source if source.is_dir() else source.parent
    if (path := source / "tokenizer.json" if source.is_dir() else source).name == "tokenizer.json" and path.exists():
        return _Source(read_regular(path), _read_named_tokens(directory), _read_chat_template(directory), None)
    path = source / MODEL_FILE if source.is_dir() else source
    if not path.exists():
        raise Z2aError(f"no tokenizer in {source}: give a .model file of sentencepiece, or a Hugging Face directory")
    model = read_model(path)
    named = {**model.named_tokens, **_read_named_tokens(directory)} if source.is_dir() else model.named_tokens
    template = _read_chat_template(directory) if source.is_dir() else None
    definition = json.dumps(to_tokenizer_json(model), ensure_ascii=False, indent=1)
    return _Source(definition.encode(), named, template, read_regular(path))


def _read_named_tokens(directory: Path) -> dict[str, str]:
    """From both files that Hugging Face has had for them."""
    files = [directory / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    named = {
        role: token for path in files if path.exists() for role, token in named_tokens(read_json_object(path)).items()
    }
    return dict(sorted(named.items()))


def _read_chat_template(directory: Path) -> str | None:
    path, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if path.exists():
        return read_template(path)
    template = read_json_object(config).get("chat_template") if config.exists() else None
    return template if isinstance(template, str) else None


def _check(tokenizer: Tokenizer, source: Path, model: bytes | None) -> int:
    """Round trips, and the ids of the sentencepiece package where it is installed; the number of texts compared."""
    texts = parity_texts(tokenizer.vocabulary)
    encoded = [ids.tolist() for ids in tokenizer.reference.encode(texts)]
    for text, ids in zip(texts, encoded, strict=True):
        if tokenizer.decode(ids) != tokenizer.normalize(text):
            raise Z2aError(f"{source} cannot be used: the text {text[:40]!r} does not decode to itself")
    if model is None:
        return 0
    try:
        import sentencepiece
    except ImportError:
        return 0
    package = sentencepiece.SentencePieceProcessor(model_proto=model)
    scores = [package.get_score(id) for id in range(package.get_piece_size())]
    is_unigram = tokenizer.vocabulary.definition["model"]["type"] == "Unigram"
    for text, ids in zip(texts, encoded, strict=True):
        theirs = package.encode(text)
        if theirs != ids and not (is_unigram and _is_tie(scores, theirs, ids)):
            raise Z2aError(f"{source} cannot be used: sentencepiece encodes {text[:40]!r} with other ids")
    return len(texts)


def _is_tie(scores: list[float], *encodings: list[int]) -> bool:
    """Whether a unigram model finds two encodings equally probable, as of a run of spaces; the package adds up in
    single precision, so it may choose another one than we do."""
    first, second = (sum(scores[id] for id in ids) for ids in encodings)
    return math.isclose(first, second, rel_tol=1e-5)


@dataclass(frozen=True)
class TiktokenFiles:
    ranks: str
    settings: str
    tokens: int
    """Number of ranks."""


def export_tiktoken(tokenizer: Tokenizer, out: Path) -> TiktokenFiles:
    """Write the rank file ``out``, and beside it ``out``.json with the pattern and special tokens it has no place for.

    >>> ranks = tiktoken.load.load_tiktoken_bpe("out.tiktoken")
    >>> settings = json.load(open("out.tiktoken.json"))
    >>> tiktoken.Encoding("mine", mergeable_ranks=ranks, **settings)
    """
    pattern = tokenizer.vocabulary.pattern  # before anything is written: not every tokenizer has one
    ranks = sorted(tokenizer.vocabulary.ranks.items(), key=lambda item: item[1])
    write_text(out, "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks))
    settings = out.with_name(out.name + ".json")
    write_json(settings, {"pat_str": pattern, "special_tokens": tokenizer.special_ids})
    return TiktokenFiles(str(out), str(settings), len(ranks))
