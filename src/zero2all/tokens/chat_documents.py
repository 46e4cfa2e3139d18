"""Conversations of a corpus to the parts of text and special tokens that the chat template makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from zero2all.console import warn
from zero2all.conversation import Conversation
from zero2all.errors import Z2aError
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.chat import ChatTemplateError, RenderedChat

COLUMNS = ["gid", "data_src", "title", "content"]
CHAT_COLUMNS = [*COLUMNS, "others"]
MAX_NAMES = 6  # special tokens in a message
MAX_REASON_CHARACTERS = 200
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclass(frozen=True)
class RenderedDocuments:
    """Documents of a batch. Text alone is a document without markers, in which every token counts."""

    batch: pa.RecordBatch
    chats: list[RenderedChat]
    sizes: pa.Array
    """Bytes of text of each document, without special tokens."""
    refused: list[str] = field(default_factory=list)
    """Gid and reason of each conversation that the template does not take."""


def render_text(batch: pa.RecordBatch) -> RenderedDocuments:
    sizes = pc.binary_length(batch["content"]).cast(pa.int64())
    return RenderedDocuments(batch, [RenderedChat([text], []) for text in batch["content"].to_pylist()], sizes)


def render_chats(batch: pa.RecordBatch, tokenizer: Tokenizer) -> RenderedDocuments:
    kept, chats, refused = [], [], []
    for number, (gid, others) in enumerate(zip(batch["gid"].to_pylist(), batch["others"].to_pylist(), strict=True)):
        try:
            chats.append(tokenizer.split_chat(**Conversation.from_json(json.loads(others)).to_json()))
        except ChatTemplateError as error:
            refused.append(f"{gid}: {error}"[:MAX_REASON_CHARACTERS])
        else:
            kept.append(number)
    sizes = pa.array([sum(len(text.encode()) for text in chat.parts[::2]) for chat in chats], pa.int64())
    return RenderedDocuments(batch.take(pa.array(kept, pa.int64())), chats, sizes, refused)


def check_chat_template(tokenizer: Tokenizer, source: str) -> None:
    """Refuse a tokenizer that cannot mark the messages of a conversation, before anything is encoded."""
    problem = ""
    if tokenizer.chat_template is None:
        problem = "has no chat template"
    elif not (markers := tokenizer.split_chat(PROBE).parts[1::2]):
        problem = "has a chat template that writes no special token of the vocabulary"
    if problem:
        names = ", ".join(list(tokenizer.special_ids)[:MAX_NAMES])
        raise Z2aError(
            f"source {source!r} holds conversations, but the tokenizer in {tokenizer.directory} {problem}: write a "
            f"chat_template.jinja there that marks messages with its special tokens ({names}, ...), or train a "
            "tokenizer with 'z2a tokenizer train RECIPE', which has a template"
        )
    end = next(name for name, id in tokenizer.special_ids.items() if id == tokenizer.eos_token_id)
    if end in markers:
        warn(
            f"the chat template of {tokenizer.directory} writes {end}, which also ends documents: with "
            "train.document_mask, attention does not cross it inside a conversation"
        )
