"""``z2a chat``: a conversation with a model that was fine-tuned on it, its history, its commands, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import tiny_recipe
from zero2all.base.errors import UsageError, Z2aError
from zero2all.corpus import build_corpus
from zero2all.evals import open_target
from zero2all.generation import SamplingParams
from zero2all.generation.serve import ChatSession
from zero2all.generation.serve.chat import with_param
from zero2all.tokens import build_tokens
from zero2all.train import train

Z2A = Path(sys.executable).with_name("z2a")
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PAIRS = [("the model", "small steps"), ("春眠不觉晓", "处处闻啼鸟"), ("a line", "of text")]


@pytest.fixture(scope="module")
def tuned(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to answer three messages, and to stop."""
    out = tmp_path_factory.mktemp("tuned")
    records = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in PAIRS
    ]
    # Different enough not to be duplicates: conversations of two turns, in every order.
    records += [{"messages": [*one["messages"], *other["messages"]]} for one in records for other in records]
    (out / "chat.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    sources = [{"name": "chat", "kind": "chat", "paths": [f"{out}/chat.jsonl"]}]
    recipe = tiny_recipe(
        workspace, f"out={out}", f"corpus.sources={json.dumps(sources)}", "corpus.dir=null", "tokens.dir=null",
        "corpus.holdout=0", "train.objective.name=sft", "train.seq_len=64", "train.steps=120",
        "train.batch_tokens=512", "train.micro_batch_tokens=null", "checkpoint.every=200 steps",
        "model.max_position_embeddings=128",
    )  # fmt: skip
    build_corpus(recipe.corpus, recipe.documents_dir)
    build_tokens(recipe.tokens, recipe.documents_dir, recipe.tokenizer_dir, recipe.tokens_dir)
    train(recipe)
    return recipe.run_dir


def make_session(tuned: Path, params: SamplingParams = GREEDY, system: str = "") -> ChatSession:
    target = open_target(str(tuned))
    return ChatSession(target.model, target.tokenizer, params, system)


def test_it_answers_what_it_has_learned_and_stops(tuned: Path) -> None:
    session = make_session(tuned)
    for question, answer in PAIRS[:2]:
        assert "".join(session.answer(question)) == answer
        assert session.stats is not None
        assert session.stats.finish_reason == "stop"
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    session.reset()
    assert session.messages == []


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(tuned: Path) -> None:
    session = make_session(tuned)
    forgotten = 0
    for _ in range(6):
        list(session.answer(PAIRS[0][0]))
        assert session.stats is not None
        forgotten += session.stats.forgotten
        assert session.stats.prompt_tokens <= 128 - GREEDY.max_tokens
        assert session.messages[0]["role"] == "user"
    assert forgotten > 0
    assert forgotten % 2 == 0
    with pytest.raises(UsageError, match="the context of the model takes 116"):
        list(session.answer("word " * 200))


def test_an_answer_that_is_interrupted_stays_in_the_history(tuned: Path) -> None:
    session = make_session(tuned)
    pieces = session.answer(PAIRS[0][0])
    first = next(pieces)
    pieces.close()
    assert session.messages[-1] == {"role": "assistant", "content": first}
    assert session.stats is not None
    assert session.stats.finish_reason == "interrupted"


def test_parameters_are_changed_by_name() -> None:
    greedy = SamplingParams(temperature=0)
    assert with_param(with_param(greedy, "temperature=0.5"), "max_tokens=7") == SamplingParams(7, 0.5)
    assert with_param(with_param(greedy, "stop=a"), "stop=b=c").stop == ("a", "b=c")
    for wrong in ("temperature", "stop=", "heat=1", "max_tokens=many", "top_p=7"):
        with pytest.raises(UsageError):
            with_param(greedy, wrong)


def test_a_tokenizer_without_a_template_is_refused_at_once(tuned: Path) -> None:
    target = open_target(str(tuned))
    target.tokenizer.chat_template = None
    with pytest.raises(Z2aError, match="no chat template"):
        ChatSession(target.model, target.tokenizer)


@pytest.mark.slow
def test_lines_of_stdin_are_messages(tuned: Path) -> None:
    lines = "\n".join(["/help", PAIRS[0][0], "", "/nonsense", "/params temperature=0", PAIRS[1][0], "/exit", "unread"])
    done = subprocess.run(
        [Z2A, "chat", str(tuned), "temperature=0", "max_tokens=12"],
        input=lines, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [PAIRS[0][1], PAIRS[1][1]]
    assert "tok/s" in done.stderr
    assert "there is no command /nonsense" in done.stderr
    assert "/reset" in done.stderr


@pytest.mark.slow
def test_on_a_terminal_the_end_of_input_ends_it(tuned: Path) -> None:
    leader, follower = pty.openpty()
    command = [Z2A, "chat", str(tuned), "temperature=0", "max_tokens=12"]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, close_fds=True)
    os.close(follower)
    seen = read_until(leader, "/help")
    os.write(leader, (PAIRS[0][0] + "\n").encode())
    seen += read_until(leader, "tok/s")
    assert PAIRS[0][1] in seen
    end = time.monotonic() + 60
    while process.poll() is None:  # what is typed before the prompt is there may be lost
        assert time.monotonic() < end, "Ctrl-D does not end it"
        with suppress(OSError):
            os.write(leader, b"\x04")
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
    assert process.returncode == 0
    os.close(leader)


def read_until(descriptor: int, word: str, seconds: float = 90.0) -> str:
    seen, end = "", time.monotonic() + seconds
    while word not in seen:
        assert time.monotonic() < end, f"never printed {word!r}: {seen}"
        if select.select([descriptor], [], [], 1.0)[0]:
            seen += os.read(descriptor, 4096).decode("utf-8", "replace")
    return seen
