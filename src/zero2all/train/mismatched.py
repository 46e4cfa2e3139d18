"""Prompts with the answers to other prompts: KTO estimates from them how far the model is from the reference."""

from __future__ import annotations

import hashlib

import numpy as np

from zero2all.errors import Z2aError
from zero2all.tokens.conversation_rows import ConversationRows
from zero2all.tokens.token_store import Array


class MismatchedAnswers:
    """For each document of a source, its prompt with the answer of the next document that has a different prompt.

    Documents with the same prompt are the two of a pair, or several ratings of one prompt, anywhere in the source. The
    pairing depends on the store alone, so that the reference scores each once.
    """

    def __init__(self, rows: ConversationRows, source: str) -> None:
        self.seq_len, self._rows = rows.seq_len, rows
        used = rows.used_documents
        prompts, sizes = [], np.zeros((len(used), 2), dtype=np.int64)
        for place, number in enumerate(used.tolist()):
            tokens, mask = rows.read_document(number)
            targets = np.flatnonzero(mask)
            prompts.append(hashlib.sha256(tokens[: targets[0]].tobytes()).digest())
            sizes[place] = targets[0], targets[-1] + 1 - targets[0]
        partners = _next_different(prompts)
        if partners is None:
            raise Z2aError(
                f"all conversations of {source} have the same prompt, and KTO needs answers to different prompts: "
                f"leave {source} out of train.mixture, or put it into one source with other prompts"
            )
        self._next = np.full(len(rows.document_lengths), -1, dtype=np.int64)
        self._next[used] = used[partners]
        self.lengths = np.full(len(rows.document_lengths), np.iinfo(np.int64).max, dtype=np.int64)
        self.lengths[used] = sizes[:, 0] + sizes[partners, 1] + 1

    def read(self, number: int) -> tuple[Array, Array]:
        """Tokens, and which of them are the answer."""
        tokens, mask = self._rows.read_document(number)
        other, other_mask = self._rows.read_document(int(self._next[number]))
        prompt = tokens[: int(mask.argmax())]
        places = np.flatnonzero(other_mask)
        answer, answer_mask = (values[places[0] : places[-1] + 1] for values in (other, other_mask))
        return (  # with an end-of-text token, as every document ends
            np.concatenate([prompt, answer, tokens[-1:]]),
            np.concatenate([np.zeros(len(prompt), dtype=bool), answer_mask, [False]]),
        )


def _next_different(prompts: list[bytes]) -> Array | None:
    """The place of the next prompt, around the end, that is different from each; None if all are the same."""
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    kinds = np.array([numbers[prompt] for prompt in prompts], dtype=np.int64)
    changes = np.flatnonzero(kinds != np.roll(kinds, -1))  # the next one is different
    if len(kinds) and not len(changes):
        return None
    found = changes[np.searchsorted(changes, np.arange(len(kinds))) % max(1, len(changes))]
    return (found + 1) % max(1, len(kinds))
