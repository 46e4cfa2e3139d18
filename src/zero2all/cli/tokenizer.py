"""z2a tokenizer train | eval | inspect | extend | export"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from zero2all.cli.conventions import (
    EngineKind,
    Json,
    Overrides,
    RayAddress,
    RecipePath,
    Result,
    Workers,
    command,
)

Directory = Annotated[Path, typer.Argument(help="A tokenizer's directory.", metavar="DIR")]

app = typer.Typer(help="Documents to a vocabulary.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Documents to a vocabulary."""


@app.command()
@command
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    engine: EngineKind = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="Of all processes together, such as 2GiB; as in the recipe.")
    ] = None,
    json: Json = False,
) -> Result:
    """Learn a byte-level BPE vocabulary from the training documents, in bounded memory.

    Example: z2a tokenizer train my.yaml tokenizer.vocab_size=65536 --max-memory 4GiB
    """
    from zero2all.engine import Engine, all_cores
    from zero2all.recipe import load_recipe
    from zero2all.tokenizer import train_tokenizer

    memory = [f"tokenizer.max_memory={max_memory}"] if max_memory else []
    loaded = load_recipe(recipe, [*(overrides or []), *memory])
    where = Engine(engine, workers or all_cores(), ray_address)
    manifest = train_tokenizer(loaded.tokenizer, loaded.documents_dir, loaded.tokenizer_dir, where)
    text = f"{manifest['vocab_size']} tokens in {loaded.tokenizer_dir}"
    return Result({"out": str(loaded.tokenizer_dir), **manifest}, text + (" (unchanged)" if manifest["reused"] else ""))


@app.command("eval")
@command
def evaluate(
    directories: Annotated[
        list[Path], typer.Argument(help="Directories with a tokenizer.json, or such files.", metavar="DIR...")
    ],
    text: Annotated[list[str], typer.Option("--text", help="NAME=PATH of held-out text; may be given again.")],
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw a picture.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Also write the table to a file.")] = None,
    json: Json = False,
) -> Result:
    """Measure tokenizers side by side: bytes per token by domain, names, numbers, code, round trips.

    Example: z2a tokenizer eval runs/mine/tokenizer qwen3/ --text zh=zh.jsonl --text en=en.txt --svg fit.svg
    """
    from zero2all.corpus.ingest import document_texts
    from zero2all.errors import UsageError
    from zero2all.io import write_text
    from zero2all.tokenizer.evaluate import evaluate_tokenizers
    from zero2all.tokenizer.evaluate_report import as_svg, as_table

    if wrong := [given for given in text if "=" not in given]:
        raise UsageError(f"--text {wrong[0]}: give it a name, as in --text zh={wrong[0]}")
    names = [path.name if path.is_dir() else path.parent.name for path in directories]
    labels = names if len(set(names)) == len(names) else list(map(str, directories))
    texts = {name: list(document_texts([path])) for name, path in (given.split("=", 1) for given in text)}
    found = evaluate_tokenizers(dict(zip(labels, directories, strict=True)), texts)
    table = as_table(found)
    if svg is not None:
        write_text(svg, as_svg(found))
    if markdown is not None:
        write_text(markdown, table + "\n")
    return Result(found, table)


@app.command()
@command
def inspect(
    directory: Directory,
    text: Annotated[str | None, typer.Argument(help="The text to cut.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Take the text from a file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page.")] = None,
    special: Annotated[bool, typer.Option("--special", help="Let names of special tokens be these tokens.")] = False,
    json: Json = False,
) -> Result:
    """Show a text cut into its tokens, in colours.

    Example: z2a tokenizer inspect runs/mine/tokenizer "春眠不觉晓 def f(x):" --html cut.html
    """
    from zero2all.errors import UsageError
    from zero2all.io import write_text
    from zero2all.tokenizer import Tokenizer
    from zero2all.tokenizer.pieces import as_html, as_terminal, cut, summary

    if (text is None) == (file is None):
        raise UsageError("give a text, or a file with --file")
    shown = text if file is None else file.read_bytes().decode("utf-8", "replace")
    pieces = cut(Tokenizer(directory), shown or "", special)
    if html is not None:
        write_text(html, as_html(pieces, str(file) if file else "Tokens"))
    data = {"tokens": [{"id": piece.id, "text": piece.shown, "hex": piece.data.hex()} for piece in pieces]}
    return Result(data, f"{as_terminal(pieces, sys.stdout.isatty())}\n\n{summary(pieces)}")


@app.command()
@command
def extend(
    directory: Directory,
    text: Annotated[list[str], typer.Option("--text", help="Text to learn from; may be given again.")],
    add: Annotated[int, typer.Option("--add", min=1, help="How many tokens to learn.")],
    out: Annotated[Path, typer.Option("--out", help="The new tokenizer's directory.")],
    min_frequency: Annotated[int, typer.Option("--min-frequency", min=1, help="Of a pair that is joined.")] = 2,
    json: Json = False,
) -> Result:
    """Learn more tokens from new text; every old id keeps its meaning.

    Example: z2a tokenizer extend runs/mine/tokenizer --text medicine/ --add 4000 --out medical-tokenizer
    """
    from zero2all.corpus.ingest import document_texts
    from zero2all.tokenizer.extend import extend_tokenizer

    made = extend_tokenizer(directory, document_texts(text), add, out, min_frequency)
    return Result({"out": str(out), **made}, f"{made['learned']} new tokens, {made['vocab_size']} in all, in {out}")


@app.command()
@command
def export(
    directory: Directory,
    tiktoken: Annotated[Path, typer.Option("--tiktoken", help="The rank file; its settings go beside it.")],
    json: Json = False,
) -> Result:
    """Write a vocabulary in the form of tiktoken.

    Example: z2a tokenizer export runs/mine/tokenizer --tiktoken mine.tiktoken
    """
    from zero2all.tokenizer import Tokenizer
    from zero2all.tokenizer.export import export_tiktoken

    made = export_tiktoken(Tokenizer(directory), tiktoken)
    return Result(made, f"{made['tokens']} ranks in {made['ranks']}, pattern and special tokens in {made['settings']}")
