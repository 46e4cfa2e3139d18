"""The documents of a step for the live page, from a child process: the server stays small and has no torch.

The child imports torch when the page starts, not when a reader clicks: that takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from zero2all.base.errors import Z2aError

ANSWER_SECONDS = 600.0


class DocumentsProcess:
    """
    >>> with DocumentsProcess() as documents:
    ...     documents(Path("runs/first/run"), step=320, losses=True)["documents"][0]["loss"]
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> DocumentsProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            setup = f"from zero2all.base.processes import end_with_parent; end_with_parent({os.getpid()})"
            program = f"{setup}; from zero2all.cli.documents_process import answer_requests; answer_requests()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        return self._process

    def __call__(self, directory: Path, step: int, losses: bool) -> object:
        """The output of ``z2a blame --json``, with losses if asked for; ``quick`` says whether these are."""
        with self._lock:
            process = self.start()
            limit = threading.Timer(ANSWER_SECONDS, process.kill)
            limit.start()
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps({"run": str(directory), "step": step, "losses": losses}) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline() or "{}")
            except OSError:
                answer = {}
            finally:
                limit.cancel()
            if not answer:
                self._end()
                raise Z2aError(f"no answer; try: z2a blame {directory} --step {step}")
        if "error" in answer:
            raise Z2aError(answer["error"])
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def answer_requests() -> None:
    """In the child: a line of JSON for each line."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that a library prints is an answer
    import torch

    from zero2all.train import Run, blame_step  # noqa: F401

    with torch.device("meta"):
        torch.nn.Embedding(1, 1)  # the first model that is built imports torch's compiler, which takes a second

    _answer_lines(sys.stdin, answers)


def _answer_lines(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        try:
            answer = _answer(**json.loads(line))
        except Z2aError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"this is a bug in zero2all: {type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(run: str, step: int, *, losses: bool) -> dict[str, Any]:
    from zero2all.train import Run, blame_step
    from zero2all.train.blame import is_quick, trace_text

    opened = Run.open(Path(run))
    return blame_step(opened, step) if losses else {**trace_text(opened, step), "quick": is_quick(opened, step)}
