"""z2a chat"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.cli.conventions import Json, Result, command
from zero2all.cli.generate import Request, complete_prompts
from zero2all.cli.runs import CheckpointStep, PipelineParallel, TensorParallel
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


Demo = Annotated[bool, typer.Option("--demo", help="Talk to the small model that ships with zero2all.")]
System = Annotated[
    str, typer.Option("--system", help="The system prompt, for a model that was trained with one. Default: none.")
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", help="Complete this text and exit; for a model without chat training. Default: talk."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="Complete each line of this file and exit; in a .jsonl file, each object's key 'prompt'. Default: talk.",
        metavar="FILE",
    ),
]
NumSamples = Annotated[int, typer.Option(min=1, help="Number of texts for each prompt.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of tokens of an answer. Default: 512; of a prompt's text 128."),
]
Temperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Sampling temperature; lower is less varied, 0 greedy. Default: 0.7; for a prompt 0.8."),
]
TopK = Annotated[
    int | None,
    typer.Option(min=0, help="Sample from the k most likely tokens, 0 from all. Default: 0; for a prompt 50."),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the fewest of the most likely tokens that have this probability together. "
        "Default: 0.95; for a prompt 1."
    ),
]
MinP = Annotated[
    float,
    typer.Option(help="Sample from tokens with at least this probability, relative to the most likely token."),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, such as 1.1 for a model that loops, tokens so far become less likely.")
]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string. Repeatable. Default: none.")]
Seed = Annotated[int, typer.Option(help="Sampling seed; another one gives other text.")]


@command
def chat(
    target: OptionalTarget = None,
    demo: Demo = False,
    system: System = "",
    prompt: Prompt = None,
    prompts: Prompts = None,
    num_samples: NumSamples = 1,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    step: CheckpointStep = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    json: Json = False,
) -> Result:
    """Talk to a model in the terminal, or complete prompts.

    Answers appear as they are generated. Lines that begin with / are commands: /help lists them. Without a terminal,
    each line of stdin is a message. --prompt and --prompts complete text instead, without a chat template.

    Example: z2a chat runs/sft --system "Answer in one sentence."

    Example: z2a chat runs/first --prompt "def main("
    """
    if demo == (target is not None):
        raise UsageError("give a run, a checkpoint or a Hugging Face directory, or --demo for a model to try")
    from zero2all.demo import DIRECTORY, QUESTIONS
    from zero2all.evals import open_target
    from zero2all.generation import SamplingParams
    from zero2all.serve import ChatSession

    is_chat = prompt is None and prompts is None
    usual = SamplingParams(512, 0.7, 0, 0.95) if is_chat else SamplingParams(128, 0.8, 50, 1.0)
    params = SamplingParams(
        usual.max_tokens if max_tokens is None else max_tokens,
        usual.temperature if temperature is None else temperature,
        usual.top_k if top_k is None else top_k,
        usual.top_p if top_p is None else top_p,
        min_p, repetition_penalty, tuple(stop or ()), seed,
    )  # fmt: skip
    model = str(DIRECTORY) if target is None else target
    if not is_chat:
        return complete_prompts(model, step, Request(prompt, prompts, num_samples, params), tp, pp, json)
    if num_samples > 1 or tp * pp > 1:
        raise UsageError("--num-samples, --tp and --pp are for --prompt or --prompts")
    opened = open_target(model, step)
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
