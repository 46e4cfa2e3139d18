"""z2a chat"""

from __future__ import annotations

import functools
import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zero2all.base.console import sanitize, say
from zero2all.base.errors import UsageError
from zero2all.cli.conventions import CheckpointStep, Json, PipelineParallel, Result, TensorParallel, command

if TYPE_CHECKING:
    from zero2all.generation import Completion, SamplingParams, TextPiece
    from zero2all.generation.serve import ChatSession
    from zero2all.model import Z2all
    from zero2all.parallel import ParallelModel

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
Params = Annotated[
    list[str] | None,
    typer.Argument(
        help="Sampling parameters. Defaults for chat: max_tokens=512 temperature=0.7 (0 is greedy) top_k=0 (all) "
        "top_p=0.95; for --prompt: max_tokens=128 temperature=0.8 top_k=50 top_p=1. Also min_p=0, seed=0, "
        "repetition_penalty=1 (1.1 for a model that loops), and stop=TEXT, which ends the text and can be repeated.",
        metavar="[NAME=VALUE]...",
    ),
]


@dataclass(frozen=True)
class PromptRequest:
    """What ``z2a chat --prompt`` is asked for."""

    prompt: str | None
    prompts: Path | None
    num_samples: int
    params: SamplingParams


@command
def chat(
    target: OptionalTarget = None,
    params: Params = None,
    demo: Demo = False,
    system: System = "",
    prompt: Prompt = None,
    prompts: Prompts = None,
    num_samples: NumSamples = 1,
    step: CheckpointStep = None,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    json: Json = False,
) -> Result:
    """Talk to a model in the terminal, or complete prompts.

    Answers appear as they are generated. Lines that begin with / are commands: /help lists them. Without a terminal,
    each line of stdin is a message. --prompt and --prompts complete text instead, without a chat template.

    Example: z2a chat runs/sft --system "Answer in one sentence."

    Example: z2a chat runs/first --prompt "def main(" temperature=0.2 max_tokens=200
    """
    words = params or []
    if demo and target is not None and "=" in target:  # there is no target before it
        words, target = [target, *words], None
    if demo == (target is not None):
        raise UsageError("give a run, a checkpoint or a Hugging Face directory, or --demo for a model to try")
    from zero2all.evals import open_target
    from zero2all.generation import SamplingParams
    from zero2all.generation.demo import DIRECTORY, QUESTIONS
    from zero2all.generation.serve.chat import ChatSession, with_param

    is_chat = prompt is None and prompts is None
    usual = SamplingParams(512, 0.7, 0, 0.95) if is_chat else SamplingParams(128, 0.8, 50, 1.0)
    sampling = functools.reduce(with_param, words, usual)
    model = str(DIRECTORY) if target is None else target
    if not is_chat:
        return _complete_prompts(model, step, PromptRequest(prompt, prompts, num_samples, sampling), tp, pp, json=json)
    if num_samples > 1 or tp * pp > 1:
        raise UsageError("--num-samples, --tp and --pp are for --prompt or --prompts")
    opened = open_target(model, step)
    session = ChatSession(opened.model, opened.tokenizer, sampling, system)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say(f"{'demo' if demo else opened.name}: write a message, or /help")
        if demo:
            say(f"A very small model of short stories. Try: {'  '.join(QUESTIONS)}")
    write: Callable[[str], object] = (lambda text: None) if json else sys.stdout.write
    for line in _lines(is_terminal=is_terminal):
        if line == "/exit":
            break
        try:
            _handle(session, line, write)
        except UsageError as error:
            say(f"error: {error}")
    return Result({"messages": session.messages}, "")


def _lines(*, is_terminal: bool) -> Iterator[str]:
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
    from zero2all.generation.serve.chat import with_param

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
            session.params = with_param(session.params, rest.strip())
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
    notes += ["ended by max_tokens"] if stats.finish_reason == "length" else []
    notes += [f"{stats.forgotten} old messages no longer fit into the context"] if stats.forgotten else []
    say(f"[{'; '.join(notes)}]")


def _complete_prompts(target: str, step: int | None, request: PromptRequest, tp: int, pp: int, *, json: bool) -> Result:
    """Complete the text of a prompt, or of each prompt of a file, without a chat template."""
    from zero2all.evals.target import find_target
    from zero2all.generation import generate_batch, stream
    from zero2all.recipe import ParallelRecipe

    if request.prompt is not None and request.prompts is not None:
        raise UsageError("give --prompt or --prompts, not both")
    texts = [request.prompt or ""] if request.prompts is None else _read_prompts(request.prompts)
    texts = [text for text in texts for _ in range(request.num_samples)]
    found = find_target(target, step)
    if tp * pp > 1:
        model: Z2all | ParallelModel = found.load_parallel_model(ParallelRecipe(tp=tp, pp=pp, dp_shard=1, sp=False))
    else:
        model = found.load_model()
    tokenizer, params = found.tokenizer, request.params
    if len(texts) == 1 and not json and tp * pp == 1 and _stdout_is_terminal():
        return Result(None, _print_stream(texts[0], stream(model, tokenizer, texts, params)))
    completions = generate_batch(model, tokenizer, texts, params)
    data = [{"prompt": text, **asdict(completion)} for text, completion in zip(texts, completions, strict=True)]
    is_rank0 = os.environ.get("RANK", "0") == "0"  # only one of several ranks reports it
    return Result({"completions": data}, _format_completions(texts, completions) if is_rank0 else "")


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise UsageError(f"--prompts: no file at {path}")
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
        lines = text.split("\n") if text else []
        prompts = [jsonlib.loads(line)["prompt"] for line in lines if line] if path.suffix == ".jsonl" else lines
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--prompts: cannot read {path}: {type(error).__name__}: {error}") from error
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError(f"--prompts: {path} must have a prompt on each line, as text")
    return prompts


def _stdout_is_terminal() -> bool:
    return sys.stdout.isatty()


def _print_stream(prompt: str, pieces: Iterator[TextPiece]) -> str:
    """Print the prompt and the text as it comes, without control characters; what is left to print."""
    sys.stdout.write(sanitize(prompt))
    sys.stdout.flush()
    for piece in pieces:
        sys.stdout.write(sanitize(piece.text))
        sys.stdout.flush()
    return "\n"


def _format_completions(prompts: list[str], completions: list[Completion]) -> str:
    texts = [prompt + completion.text for prompt, completion in zip(prompts, completions, strict=True)]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"── {number} {'─' * 40}\n{text}" for number, text in enumerate(texts, 1))
