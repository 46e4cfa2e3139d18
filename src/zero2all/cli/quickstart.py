"""z2a quickstart"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import Json, Result, command


@command
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Where everything is put.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", help="A file or directory of text; more of them may follow. Each is a source."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(help="More --corpus paths, and changes to the recipe (train.steps=50)."),
    ] = None,
    json: Json = False,
) -> Result:
    """Text to a model that speaks, in a few minutes on a CPU. Without --corpus it reads Python's standard library.

    Example: z2a quickstart --corpus books/ notes/ --out runs/first
    """
    from zero2all.quickstart import quickstart, summary_text

    overrides = [word for word in more or [] if "=" in word and not Path(word).exists()]
    paths = [*(corpus or []), *(Path(word) for word in more or [] if word not in overrides)]
    result = quickstart(out, paths, overrides)
    return Result(result, summary_text(result))
