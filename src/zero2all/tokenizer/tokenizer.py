"""The tokenizer as the rest of the project uses it: text in, ordinary ids out, special ids only by name.

The directory is a plain Hugging Face one, so ``AutoTokenizer.from_pretrained`` reads it. Loaded that way, the text
``<|endoftext|>`` inside a document becomes the special token, which lets any author of text end a document or
forge a role. Here the encoders are built without the special tokens, so their names are plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.base.errors import Z2aError
from zero2all.base.io import fingerprint, read_json_object, read_regular
from zero2all.tokenizer.backends import BackendName, Encoder, HuggingFace, Ids, choose_backend
from zero2all.tokenizer.chat import (
    MAX_TEMPLATE_BYTES,
    ChatInput,
    ChatTemplate,
    ChatTemplateError,
    JsonObject,
    RenderedChat,
)
from zero2all.tokenizer.hf_directory import without_begin_token
from zero2all.tokenizer.tokenizer_json import read_tokenizer_json
from zero2all.tokenizer.vocabulary import END_OF_TEXT, IM_END, AllowSpecial, allowed_names, split_special

# What the error handler "surrogateescape" makes of bytes that are no text.
_INVALID_UTF8 = re.compile("[\udc80-\udcff]")


TokenizerState = tuple[Path, BackendName, bytes, str | None, dict[str, str], list[int]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class EncodedChat:
    """The tokens of a conversation."""

    ids: Ids
    generated: Mask
    """Whether the assistant writes a token: its messages, each with the special token that ends it."""


class Tokenizer:
    """A trained tokenizer: encodes text and chats, and decodes ids. Text is never parsed as a special token.

    >>> tokenizer = Tokenizer("runs/quickstart/tokenizer")
    >>> tokenizer.decode(tokenizer.encode("<|endoftext|> is only text here"))
    '<|endoftext|> is only text here'

    Every backend encodes a lone surrogate as U+FFFD, and a surrogate pair as the character it means; all other text
    and, with ``encode_bytes``, all bytes round-trip exactly. An imported tokenizer may change some text:
    ``normalize`` tells how.
    """

    def __init__(self, directory: str | Path, backend: BackendName = "auto") -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            made_by = "'z2a tokenizer train RECIPE', or take one over with 'z2a tokenizer import'"
            raise Z2aError(f"no tokenizer in {directory}: make one with {made_by}")
        self.__setstate__((Path(directory), backend, read_regular(path), *_chat_settings(Path(directory))))

    def __getstate__(self) -> TokenizerState:
        """All that defines a tokenizer, so that a copy, also in another process, is built in the same safe way."""
        return self._state

    def __setstate__(self, state: TokenizerState) -> None:
        self._state = state
        self.directory, self._wanted_backend, self.json_bytes = state[:3]
        self.chat_template, self._named_tokens, self._end_ids = state[3:]
        definition = read_tokenizer_json(self.directory / "tokenizer.json", self.json_bytes)
        self.special_ids: dict[str, int] = definition.special_ids
        self.control_ids: list[int] = definition.control_ids
        self.vocabulary = definition.text
        self.vocab_size = 1 + max([*self.vocabulary.ids.values(), *self.special_ids.values()])
        end = next(((name, id) for name, id in self.special_ids.items() if name == END_OF_TEXT), None)
        self.fingerprint = sha256(without_begin_token(self.json_bytes, *end) if end else self.json_bytes).hexdigest()

    @property
    def eos_token_id(self) -> int:
        """Ends a document: ``<|endoftext|>``, or in a vocabulary without it what Hugging Face's files name so."""
        for name in (END_OF_TEXT, self._named_tokens.get("eos_token")):
            if name in self.special_ids:
                return self.special_ids[name]
        raise Z2aError(
            f"{self.directory / 'tokenizer.json'} has no special token {END_OF_TEXT}, which ends a document, and "
            "tokenizer_config.json names no eos_token: add that there, or train one with 'z2a tokenizer train RECIPE'"
        )

    @property
    def begin_token_id(self) -> int | None:
        """What other programs begin a text with, by the post-processor; ``encode`` does not."""
        processor = json.loads(self.json_bytes).get("post_processor") or {}
        first = next(iter(processor.get("single") or []), None) if isinstance(processor, dict) else None
        name = first.get("SpecialToken", {}).get("id") if isinstance(first, dict) else None
        return self.special_ids.get(name) if isinstance(name, str) else None

    @property
    def stop_token_ids(self) -> list[int]:
        """Where generation ends: with the document, or with a chat message where the vocabulary has such an end."""
        names = dict.fromkeys((END_OF_TEXT, IM_END, self._named_tokens.get("eos_token")))
        own = [self.special_ids[name] for name in names if name in self.special_ids]
        return list(dict.fromkeys([*own, *(id for id in self._end_ids if id < self.vocab_size)]))

    @cached_property
    def reference(self) -> HuggingFace:
        """The encoder that defines the correct ids."""
        try:
            return HuggingFace(self.vocabulary)
        except Z2aError as error:
            raise Z2aError(f"{self.directory / 'tokenizer.json'}: {error}") from error

    @cached_property
    def continuation(self) -> HuggingFace:
        """The encoder of text that follows other text: it puts no space before it."""
        if self.vocabulary.space_before == "never":
            return self.reference
        return HuggingFace(self.vocabulary.without_space_before())

    @cached_property
    def backend(self) -> Encoder:
        """The encoder of batches: the one requested, or the fastest installed, after its check on this vocabulary."""
        return choose_backend(self._wanted_backend, self.vocabulary, self.reference)

    def encode(self, text: str, allow_special: AllowSpecial = "none") -> list[int]:
        """The ids of a text by the reference encoder.

        >>> tokenizer.encode("a<|pad|>", allow_special={"<|pad|>"})[-1] == tokenizer.special_ids["<|pad|>"]
        True
        """
        ids: list[int] = self._encode_with(self.reference, [text], allow_special)[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], allow_special: AllowSpecial = "none") -> list[Ids]:
        """The same ids as ``encode`` on every text, as arrays, on all cores, by the fastest backend."""
        return self._encode_with(self.backend, list(texts), allow_special)

    def _encode_with(self, backend: Encoder, texts: list[str], allow_special: AllowSpecial) -> list[Ids]:
        names = allowed_names(allow_special, self.special_ids, texts)
        if not names:
            return _encode_with_surrogates(backend, texts)
        return self.encode_split(backend, [split_special(text, names) for text in texts])

    def encode_split(self, backend: Encoder, rows: Sequence[Sequence[str]]) -> list[Ids]:
        """The ids of texts that were split at special tokens, as by ``split_special``."""
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in self._encode_parts(backend, rows)]

    def _encode_parts(self, backend: Encoder, rows: Sequence[Sequence[str]]) -> list[list[Ids]]:
        first = iter(_encode_with_surrogates(backend, [row[0] for row in rows]))
        after_special = self.continuation if self.vocabulary.space_before == "first" else backend
        following = [text for row in rows for text in row[2::2]]
        rest = iter(_encode_with_surrogates(after_special, following) if following else [])
        encoded = []
        for row in rows:
            parts = [next(first)]
            for name in row[1::2]:
                parts += [np.array([self.special_ids[name]], dtype=np.uint32), next(rest)]
            encoded.append(parts)
        return encoded

    def encode_chats(self, backend: Encoder, chats: Sequence[RenderedChat]) -> list[EncodedChat]:
        """The ids of conversations that were rendered by ``split_chat``, and which of them the assistant writes."""
        rows = self._encode_parts(backend, [chat.parts for chat in chats])
        return [
            EncodedChat(np.concatenate(ids), self._generated_tokens(chat, ids))
            for chat, ids in zip(chats, rows, strict=True)
        ]

    def _generated_tokens(self, chat: RenderedChat, rows: list[Ids]) -> Mask:
        """A token counts if any of its characters is in a range, as in transformers."""
        masks = []
        end = 0
        for part, ids in zip(chat.parts, rows, strict=True):
            begin, end = end, end + len(part)
            inside = [(max(b, begin) - begin, min(e, end) - begin) for b, e in chat.generated if b < end and e > begin]
            if not inside or inside == [(0, len(part))]:
                masks.append(np.full(len(ids), bool(inside)))
                continue
            # Bytes, because characters may span tokens. Some vocabularies put a space before the text.
            ends = np.cumsum([len(self.token_bytes[id]) for id in ids.tolist()])
            starts = np.concatenate([[0], ends[:-1]])
            space = int(ends[-1]) - len(self._normalized_bytes(part))
            mask = np.zeros(len(ids), dtype=bool)
            for first, last in inside:
                low, high = (space + len(self._normalized_bytes(part[:place])) for place in (first, last))
                mask |= (ends > low) & (starts < high)
            masks.append(mask)
        return np.concatenate(masks)

    def _normalized_bytes(self, text: str) -> bytes:
        return self.normalize(repair_surrogates(text)).encode()

    def render_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """The ids of a conversation by the chat template. Only the template's own markers are special tokens.

        >>> tokenizer.render_chat([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        """
        chat = self.split_chat(messages, tools, add_generation_prompt=add_generation_prompt, mark_generated=False)
        ids: list[int] = self.encode_split(self.reference, [chat.parts])[0].tolist()
        return ids

    def split_chat(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = False,
        mark_generated: bool = True,
    ) -> RenderedChat:
        """A conversation by the chat template, as text and special tokens, for ``encode_chats``."""
        return self._template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, mark_generated=mark_generated
        )

    def split_chats(self, chats: Sequence[ChatInput]) -> list[RenderedChat | ChatTemplateError]:
        """Many conversations at once, which is faster; for each that the template does not take, the reason."""
        return self._template.render_many(chats)

    @property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise Z2aError(f"the tokenizer in {self.directory} has no chat template")
        name = f"the chat template of {self.directory}"
        return ChatTemplate(self.chat_template, frozenset(self.special_ids), self._named_tokens, name)

    @property
    def chat_fingerprint(self) -> str:
        """The fingerprint of all that rendering depends on besides the vocabulary."""
        return fingerprint([self.chat_template, self._named_tokens])

    def encode_bytes(self, data: bytes, *, follows_text: bool = False) -> list[int]:
        """Ids that ``decode_bytes`` turns back into exactly these bytes: runs of UTF-8 as text, other bytes one by one.

        ``follows_text``: they come after other ids, so no space is put before them.

        >>> tokenizer.decode_bytes(tokenizer.encode_bytes(b"caf\\xe9"))
        b'caf\\xe9'
        """
        text = data.decode("utf-8", "surrogateescape")
        first, *rest = _INVALID_UTF8.split(text)
        encoder = self.continuation if follows_text else self.reference
        ids: list[int] = _encode_with_surrogates(encoder, [first])[0].tolist()
        runs = _encode_with_surrogates(self.continuation, rest)
        for byte, run in zip(_INVALID_UTF8.findall(text), runs, strict=True):
            ids += [self.vocabulary.byte_ids[ord(byte) - 0xDC00], *run.tolist()]
        return ids

    def normalize(self, text: str) -> str:
        """``decode(encode(text))``: the text itself with a tokenizer that was trained here."""
        return self.vocabulary.normalize(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The exact text, with U+FFFD for invalid UTF-8 (as when ids are truncated inside a character)."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        table = self.token_bytes
        data = b"".join([table[id] for id in ids])
        return data if self.vocabulary.space_before == "never" else data.removeprefix(b" ")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; for a special token, its name."""
        table = [b""] * self.vocab_size
        for id, token in self.vocabulary.token_bytes.items():
            table[id] = token
        for name, id in self.special_ids.items():
            table[id] = name.encode()
        return table

    @cached_property
    def token_byte_lengths(self) -> list[int]:
        """The number of bytes of text of each id: 0 for special tokens.

        Where a space is put before each document, the end of a document counts as -1: so the sum over its tokens is
        the size of its text.
        """
        special = set(self.special_ids.values())
        lengths = [0 if id in special else len(data) for id, data in enumerate(self.token_bytes)]
        if self.vocabulary.space_before != "never":
            lengths[self.eos_token_id] = -1
        return lengths


def _encode_with_surrogates(backend: Encoder, texts: list[str]) -> list[Ids]:
    """Encode text that may contain surrogates. They are rare, so they are replaced only when a backend fails."""
    try:
        return backend.encode(texts)
    except (TypeError, UnicodeError):
        repaired = [repair_surrogates(text) for text in texts]
        if repaired == texts:
            raise
        return backend.encode(repaired)


def repair_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _chat_settings(directory: Path) -> tuple[str | None, dict[str, str], list[int]]:
    """The chat template, the named tokens that it may use, and where generation ends, from Hugging Face's files."""
    path = directory / "tokenizer_config.json"
    config = read_json_object(path) if path.exists() else {}
    template = directory / "chat_template.jinja"
    source = read_template(template) if template.exists() else config.get("chat_template")
    generation = directory / "generation_config.json"
    ends = (read_json_object(generation) if generation.exists() else {}).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    return source, named_tokens(config), [id for id in ends if type(id) is int and id >= 0]


def read_template(path: Path) -> str:
    try:
        return read_regular(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Z2aError(f"{path} is no text in UTF-8") from error


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens with a role, such as ``eos_token``; older files describe a token instead of naming it."""
    named = {role: token.get("content") if isinstance(token, dict) else token for role, token in config.items()}
    return {role: token for role, token in named.items() if role.endswith("_token") and isinstance(token, str)}
