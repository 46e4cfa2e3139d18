"""The tokenizer as the rest of the project uses it: text in, ordinary ids out, special ids only by name.

The directory is a plain Hugging Face one, so ``AutoTokenizer.from_pretrained`` reads it. Loaded that way, the text
``<|endoftext|>`` inside a document becomes the special token, which lets any author of text end a document or
forge a role. Here the encoder is built without the special tokens, so their text is only text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from zero2all.errors import Z2aError
from zero2all.io import read_json, sha256_file
from zero2all.tokenizer.vocabulary import END_OF_TEXT, byte_alphabet


class Tokenizer:
    """
    >>> tokenizer = Tokenizer("runs/quickstart/tokenizer")
    >>> tokenizer.decode(tokenizer.encode("<|endoftext|> is only text here"))
    '<|endoftext|> is only text here'
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.exists():
            raise Z2aError(f"no tokenizer in {directory}: make one with 'z2a tokenizer train RECIPE'")
        definition = read_json(path)
        self.special_ids: dict[str, int] = {token["content"]: token["id"] for token in definition["added_tokens"]}
        self._vocabulary: dict[str, int] = definition["model"]["vocab"]
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": []}))
        self.fingerprint = sha256_file(path)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary) + len(self.special_ids)

    @property
    def end_of_text(self) -> int:
        return self.special_ids[END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The same ids as ``encode`` on every text, on all cores."""
        return [encoding.ids for encoding in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The exact text, with U+FFFD for bytes that are no text (as when ids were cut inside a character)."""
        return b"".join(self.token_bytes[int(id)] for id in ids).decode("utf-8", "replace")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; a special token stands for its own name."""
        alphabet = byte_alphabet()
        table = [b""] * self.vocab_size
        for token, id in self._vocabulary.items():
            table[id] = bytes(alphabet[character] for character in token)
        for token, id in self.special_ids.items():
            table[id] = token.encode()
        return table

    @cached_property
    def text_bytes(self) -> list[int]:
        """How many bytes of text each id stands for: none for the special ones."""
        special = set(self.special_ids.values())
        return [0 if id in special else len(data) for id, data in enumerate(self.token_bytes)]
