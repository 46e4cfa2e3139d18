"""z2a quickstart"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, Verbose, resumable_command


@resumable_command
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Output directory of all stages.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            help="Text to train on: files or directories; several paths can follow. Default: generated stories.",
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More paths for --corpus, and recipe overrides such as train.steps=50."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Then fine-tune it on conversations, and check its answers.")
    ] = False,
    verbose: Verbose = False,
    json: Json = False,
) -> Result:
    """Train a small model end to end, in minutes on a CPU.

    Without --corpus it trains on short stories in English and Chinese that it writes itself. With --chat it becomes a
    model that answers, in the directory chat below --out: 'z2a chat' talks to it.

    Example: z2a quickstart --corpus books/ notes/ --out runs/first
    """
    from zero2all.quickstart import quickstart, summary_text

    overrides = [word for word in more or [] if "=" in word and not Path(word).exists()]
    paths = [*(corpus or []), *(Path(word) for word in more or [] if word not in overrides)]
    result = quickstart(out, paths, overrides, [] if chat else None)
    return Result(result.to_json(), summary_text(result))
