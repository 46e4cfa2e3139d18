"""z2a tokenizer train | import | eval | inspect | extend | export"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from zero2all.cli.conventions import (
    Json,
    Overrides,
    Ray,
    RecipePath,
    Result,
    Workers,
    command,
    resumable_command,
    task_engine,
)

TokenizerDir = Annotated[Path, typer.Argument(help="Tokenizer directory.", metavar="DIR")]

app = typer.Typer(help="Train, import, evaluate, inspect and export tokenizers.", no_args_is_help=True)


@app.command()
@resumable_command
def train(
    recipe: RecipePath, overrides: Overrides = None, workers: Workers = None, ray: Ray = None, json: Json = False
) -> Result:
    """Train a byte-level BPE tokenizer in bounded memory.

    Example: z2a tokenizer train my.yaml tokenizer.vocab_size=65536 tokenizer.max_memory=4GiB
    """
    from zero2all.base.io import MANIFEST, read_json
    from zero2all.base.tasks import available_cores
    from zero2all.recipe import load_recipe
    from zero2all.tokenizer import train_tokenizer
    from zero2all.tokenizer.manifest import KIND

    loaded = load_recipe(recipe, overrides)
    where = task_engine(workers or available_cores(), ray)

    def before_replace() -> None:
        from zero2all.train.data_in_use import commands_beside, refuse_tokenizer_change

        remedy = commands_beside("tokenizer", loaded, recipe, overrides or [])
        refuse_tokenizer_change(loaded.tokenizer_dir, loaded.out, remedy)

    trained = train_tokenizer(loaded.tokenizer, loaded.documents_dir, loaded.tokenizer_dir, where, before_replace)
    text = f"{trained.vocab_size} tokens in {loaded.tokenizer_dir}"
    # The manifest of a tokenizer that was there also says which version trained it.
    manifest = read_json(loaded.tokenizer_dir / MANIFEST) if trained.reused else {"kind": KIND, **asdict(trained)}
    return Result(
        {"out": str(loaded.tokenizer_dir), **manifest, "reused": trained.reused},
        text + (" (unchanged)" if trained.reused else ""),
    )


@app.command("import")
@command
def import_(
    source: Annotated[
        Path, typer.Argument(help="A .model file of sentencepiece, or a Hugging Face directory.", metavar="SOURCE")
    ],
    out: Annotated[Path, typer.Option("--out", help="The directory of the tokenizer.")],
    json: Json = False,
) -> Result:
    """Import a sentencepiece or Hugging Face tokenizer.

    Set tokenizer.dir to the new directory to use it.

    Example: z2a tokenizer import llama/tokenizer.model --out llama-tokenizer
    """
    from zero2all.tokenizer.import_export import import_tokenizer
    from zero2all.tokenizer.manifest import KIND

    made = import_tokenizer(source, out, _refuse_if_in_use(out))
    same = f", with the ids of sentencepiece on {made.compared_with_sentencepiece} texts"
    text = f"{made.vocab_size} tokens in {out}" + (same if made.compared_with_sentencepiece else "")
    return Result({"out": str(out), "kind": KIND, **asdict(made)}, text)


@app.command("eval")
@command
def evaluate(
    directories: Annotated[
        list[Path], typer.Argument(help="Tokenizer directories, or tokenizer.json files.", metavar="DIR...")
    ],
    text: Annotated[list[str], typer.Option("--text", help="Text to evaluate on, as NAME=PATH. Can be repeated.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Also write a bar chart to this SVG file. Default: none.")
    ] = None,
    json: Json = False,
) -> Result:
    """Compare tokenizers on your text.

    The Markdown table lists bytes per token by domain, fertility on names, numbers and code, and the round-trip rate.

    Example: z2a tokenizer eval runs/mine/tokenizer qwen3/ --text zh=zh.jsonl --text en=en.txt --svg fit.svg
    """
    from zero2all.base.errors import UsageError
    from zero2all.base.io import write_text
    from zero2all.corpus.ingest import document_texts
    from zero2all.tokenizer.evaluate import evaluate_tokenizers, render_svg, render_table

    if wrong := [given for given in text if "=" not in given]:
        raise UsageError(f"--text {wrong[0]}: give it a name, as in --text zh={wrong[0]}")
    names = [path.name if path.is_dir() else path.parent.name for path in directories]
    labels = names if len(set(names)) == len(names) else list(map(str, directories))
    texts = {name: list(document_texts([path])) for name, path in (given.split("=", 1) for given in text)}
    evaluation = evaluate_tokenizers(dict(zip(labels, directories, strict=True)), texts)
    table = render_table(evaluation)
    if svg is not None:
        write_text(svg, render_svg(evaluation))
    return Result(evaluation, table)


@app.command()
@command
def inspect(
    directory: TokenizerDir,
    text: Annotated[str, typer.Argument(help="The text to tokenize, or - to read it from stdin.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write an HTML page to this file. Default: none.")
    ] = None,
    json: Json = False,
) -> Result:
    """Show how a text is tokenized, in colour.

    Example: z2a tokenizer inspect runs/mine/tokenizer "春眠不觉晓 def f(x):" --html tokens.html
    """
    from zero2all.base.io import write_text
    from zero2all.tokenizer import Tokenizer
    from zero2all.tokenizer.token_spans import render_html, render_terminal, summary, token_spans

    shown = sys.stdin.buffer.read().decode("utf-8", "replace") if text == "-" else text
    spans = token_spans(Tokenizer(directory), shown)
    if html is not None:
        write_text(html, render_html(spans, "Tokens"))
    data = {"tokens": [{"id": span.id, "text": span.display_text, "hex": span.data.hex()} for span in spans]}
    return Result(data, f"{render_terminal(spans, colour=sys.stdout.isatty())}\n\n{summary(spans)}")


@app.command()
@command
def extend(
    directory: TokenizerDir,
    text: Annotated[list[str], typer.Option("--text", help="Text to learn new tokens from. Can be repeated.")],
    add: Annotated[int, typer.Option("--add", min=1, help="Number of tokens to add.")],
    out: Annotated[Path, typer.Option("--out", help="The directory of the new tokenizer.")],
    characters: Annotated[
        Literal["any", "chinese"],
        typer.Option(
            "--characters",
            help="With chinese, new tokens have Chinese characters and punctuation only, so other text is encoded as "
            "before.",
        ),
    ] = "any",
    json: Json = False,
) -> Result:
    """Add tokens learned from new text; old ids stay the same.

    Example: z2a tokenizer extend llama-tokenizer --text zh/ --add 4000 --characters chinese --out llama-zh
    """
    from zero2all.corpus.ingest import document_texts
    from zero2all.tokenizer.extend import extend_tokenizer
    from zero2all.tokenizer.manifest import KIND

    made = extend_tokenizer(
        directory, document_texts(text), add, out, before_replace=_refuse_if_in_use(out), characters=characters
    )
    summary = f"{made.learned} new tokens, {made.vocab_size} in total, in {out}"
    return Result({"out": str(out), "kind": KIND, **asdict(made)}, summary)


@app.command()
@command
def export(
    directory: TokenizerDir,
    tiktoken: Annotated[
        Path, typer.Option("--tiktoken", help="The tiktoken rank file to write; its settings go to FILE.json.")
    ],
    json: Json = False,
) -> Result:
    """Export a tokenizer in tiktoken format.

    Example: z2a tokenizer export runs/mine/tokenizer --tiktoken mine.tiktoken
    """
    from zero2all.tokenizer import Tokenizer
    from zero2all.tokenizer.import_export import export_tiktoken

    made = export_tiktoken(Tokenizer(directory), tiktoken)
    return Result(made, f"{made.tokens} ranks in {made.ranks}, pattern and special tokens in {made.settings}")


def _refuse_if_in_use(out: Path) -> Callable[[], None]:
    """For ``before_replace``."""

    def refuse() -> None:
        from zero2all.train.data_in_use import refuse_tokenizer_change

        refuse_tokenizer_change(out, out.parent, ": choose another --out")

    return refuse
