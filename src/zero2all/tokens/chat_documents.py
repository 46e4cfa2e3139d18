"""Conversations of a corpus to the parts of text and special tokens that the chat template makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from zero2all.base.conversation import ChatExample, Conversation, SourceKind
from zero2all.base.errors import Z2aError
from zero2all.tokenizer import Tokenizer
from zero2all.tokenizer.chat import ChatInput, ChatTemplateError, RenderedChat, TemplateLimitError

COLUMNS = ["gid", "data_src", "title", "content"]
CHAT_COLUMNS = [*COLUMNS, "others"]
MAX_NAMES = 6  # special tokens in a message
MAX_REASON_CHARACTERS = 200
MAX_OVER_LIMITS = 3  # conversations of a batch that the template takes too long or too much memory for
DESIRABLE, UNDESIRABLE = 1, 2  # what marks the tokens of an answer
PROBE = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "third"},
    {"role": "user", "content": "fourth"},
    {"role": "assistant", "content": "fifth"},
]


@dataclass(frozen=True)
class RenderedDocuments:
    """Documents of a batch. Text alone is a document without markers, in which every token counts."""

    batch: pa.RecordBatch
    chats: list[RenderedChat]
    labels: list[int]
    """What marks the tokens that the assistant writes in each of them: 1, or 2 if its answer is rejected."""
    sizes: pa.Array
    """Bytes of text of each document, without special tokens."""
    refused: list[str] = field(default_factory=list)
    """Gid and reason of each conversation that the template does not take."""


def render_text(batch: pa.RecordBatch) -> RenderedDocuments:
    sizes = pc.binary_length(batch["content"]).cast(pa.int64())
    chats = [RenderedChat([text], []) for text in batch["content"].to_pylist()]
    return RenderedDocuments(batch, chats, [DESIRABLE] * len(chats), sizes)


def render_chats(batch: pa.RecordBatch, tokenizer: Tokenizer, kind: SourceKind) -> RenderedDocuments:
    """A pair is two documents, one after the other."""
    gids = batch["gid"].to_pylist()
    examples = [ChatExample.from_json(json.loads(others), kind) for others in batch["others"].to_pylist()]
    inputs = [ChatInput(**one.to_json()) for example in examples for one in _conversations(example)]
    rendered = iter(tokenizer.split_chats(inputs))
    rows, chats, labels, refused, over_limits = [], [], [], [], 0
    for number, (gid, example) in enumerate(zip(gids, examples, strict=True)):
        found = list(islice(rendered, len(_conversations(example))))
        try:
            learned = [
                _learned_part(chat, one, example) for chat, one in zip(found, _conversations(example), strict=True)
            ]
        except ChatTemplateError as error:
            over_limits += isinstance(error, TemplateLimitError)
            if over_limits > MAX_OVER_LIMITS:  # each takes seconds: a build would never end
                raise
            refused.append(f"{gid}: {error}"[:MAX_REASON_CHARACTERS])
            continue
        first = DESIRABLE if example.desirable is not False else UNDESIRABLE
        rows += [number] * len(learned)
        chats += learned
        labels += [first, UNDESIRABLE][: len(learned)]
    sizes = pa.array([sum(len(text.encode()) for text in chat.parts[::2]) for chat in chats], pa.int64())
    return RenderedDocuments(batch.take(pa.array(rows, pa.int64())), chats, labels, sizes, refused)


def _conversations(example: ChatExample) -> list[Conversation]:
    return [example.conversation] if example.rejected is None else [example.conversation, example.rejected]


def _learned_part(
    chat: RenderedChat | ChatTemplateError, conversation: Conversation, example: ChatExample
) -> RenderedChat:
    """Only messages after the prompt count as generated."""
    if isinstance(chat, ChatTemplateError):
        raise chat
    answers = [message.role == "assistant" for message in conversation.messages]
    if example.first_learned and len(chat.generated) != sum(answers):
        raise ChatTemplateError("the chat template does not tell which answer is the last")
    return replace(chat, generated=chat.generated[sum(answers[: example.first_learned]) :])


def _render_probe(tokenizer: Tokenizer) -> tuple[list[dict[str, str]], list[str]]:
    """A conversation of several turns and its parts; without a system message if the template takes none."""
    try:
        return PROBE, tokenizer.split_chat(PROBE).parts
    except ChatTemplateError:
        return PROBE[1:], tokenizer.split_chat(PROBE[1:]).parts


def check_chat_template(tokenizer: Tokenizer, source: str) -> None:
    """Refuse a tokenizer that cannot mark the messages of a conversation, before anything is encoded."""
    problem = ""
    if tokenizer.chat_template is None:
        problem = "has no chat template"
    else:
        probe, parts = _render_probe(tokenizer)
        markers, text = parts[1::2], "".join(parts)
        if not markers:
            problem = "has a chat template that writes no special token of the vocabulary"
        elif dropped := [message["role"] for message in probe if message["content"] not in text]:
            problem = f"has a chat template that drops messages of a conversation ({', '.join(dropped)})"
    if problem:
        names = ", ".join(list(tokenizer.special_ids)[:MAX_NAMES])
        raise Z2aError(
            f"source {source!r} holds conversations, but the tokenizer in {tokenizer.directory} {problem}: write a "
            f"chat_template.jinja there that marks every message with its special tokens ({names}, ...), or train a "
            "tokenizer with 'z2a tokenizer train RECIPE', which has a template"
        )
