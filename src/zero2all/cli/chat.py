"""z2a chat"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.cli.runs import CheckpointStep
from zero2all.console import sanitize, say
from zero2all.errors import UsageError

if TYPE_CHECKING:
    from zero2all.serve import ChatSession

OptionalTarget = Annotated[
    str | None,
    typer.Argument(help="A run, a checkpoint of a run or a Hugging Face directory.", metavar="[RUN|CHECKPOINT|HF_DIR]"),
]
HELP = """/reset             forget the conversation
/system TEXT       set the system prompt, and forget the conversation
/params            show the sampling parameters
/params NAME=VALUE set one, such as temperature=0.2
/help              show these commands
/exit              end; Ctrl-D does too. Ctrl-C ends an answer"""


@command
def chat(
    target: OptionalTarget = None,
    demo: Annotated[bool, typer.Option("--demo", help="Talk to the small model that ships with zero2all.")] = False,
    system: Annotated[str, typer.Option("--system", help="The system prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature. 0 is greedy decoding.")] = 0.7,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the fewest of the most likely tokens that have this probability together."),
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    step: CheckpointStep = None,
    json: Json = False,
) -> Result:
    """Talk to a model in the terminal.

    Answers appear as they are generated. Lines that begin with / are commands: /help lists them. Without a terminal,
    each line of stdin is a message.

    Example: z2a chat runs/sft --system "Answer in one sentence."
    """
    if demo == (target is not None):
        raise UsageError("give a run, a checkpoint or a Hugging Face directory, or --demo for a model to try")
    from zero2all.demo import DIRECTORY, QUESTIONS
    from zero2all.evals import open_target
    from zero2all.generation import SamplingParams
    from zero2all.serve import ChatSession

    opened = open_target(str(DIRECTORY) if target is None else target, step)
    params = SamplingParams(max_tokens, temperature, top_k=0, top_p=top_p, seed=seed)
    session = ChatSession(opened.model, opened.tokenizer, params, system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say(f"{'demo' if demo else opened.name}: write a message, or /help")
        if demo:
            say(f"A very small model of short stories. Try: {'  '.join(QUESTIONS)}")
    write: Callable[[str], object] = (lambda text: None) if json else sys.stdout.write
    for line in _lines(is_terminal):
        if line == "/exit":
            break
        try:
            _handle(session, line, write)
        except UsageError as error:
            say(f"error: {error}")
    return Result({"messages": session.messages}, "")


def _lines(is_terminal: bool) -> Iterator[str]:
    """The lines that are not empty, until there are no more."""
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # editing and history for input()
    with suppress(EOFError):
        while True:
            line = (input("> ") if is_terminal else _read_line()).strip()
            if line:
                yield line


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _handle(session: ChatSession, line: str, write: Callable[[str], object]) -> None:
    name, _, rest = line.partition(" ")
    if not line.startswith("/"):
        _answer(session, line, write)
    elif name == "/reset":
        session.reset()
        say("the conversation is forgotten")
    elif name == "/system":
        session.system = rest.strip()
        session.reset()
        say("the system prompt is set, and the conversation forgotten")
    elif name == "/params":
        if rest.strip():
            session.set_param(rest.strip())
        say(", ".join(f"{name}={value}" for name, value in asdict(session.params).items() if name != "stop"))
    elif name == "/help":
        say(HELP)
    else:
        raise UsageError(f"there is no command {name}: /help lists them")


@contextmanager
def _without_echo() -> Iterator[None]:
    """What is typed meanwhile stands at the next prompt, not inside the answer."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before[:3], before[3] & ~(termios.ECHO | termios.ECHONL), *before[4:]]
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _answer(session: ChatSession, text: str, write: Callable[[str], object]) -> None:
    with _without_echo(), closing(session.answer(text)) as pieces:
        try:
            for piece in pieces:
                write(sanitize(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:  # ends the answer, not the conversation
            pass
    write("\n")
    sys.stdout.flush()
    stats = session.stats
    assert stats is not None
    notes = [f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tok/s"]
    notes += ["interrupted"] if stats.finish_reason == "interrupted" else []
    notes += ["ended by --max-tokens"] if stats.finish_reason == "length" else []
    notes += [f"{stats.forgotten} old messages no longer fit into the context"] if stats.forgotten else []
    say(f"[{'; '.join(notes)}]")
