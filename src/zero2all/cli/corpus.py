"""z2a corpus build | sniff | report"""

from __future__ import annotations

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
from zero2all.paths import to_path

FilePath = Annotated[str, typer.Argument(help="A file, a directory or a URL.", metavar="PATH")]

app = typer.Typer(help="Raw files to documents.", no_args_is_help=True)


quality_app = typer.Typer(help="A small classifier of good text, for the filter quality_score.", no_args_is_help=True)
app.add_typer(quality_app, name="quality")


@quality_app.callback()
def quality_group() -> None:
    """A small classifier of good text, for the filter quality_score."""


@quality_app.command("train")
@command
def quality_train(
    good: Annotated[list[str], typer.Option("--good", help="Text to find more of; may be given again.")],
    bad: Annotated[list[str], typer.Option("--bad", help="Text to be rid of; may be given again.")],
    out: Annotated[Path, typer.Option("--out", help="The model: OUT.npz and OUT.json.")],
    json: Json = False,
) -> Result:
    """Learn to tell good text from bad by examples of both.

    Example: z2a corpus quality train --good books/ --bad crawl.jsonl --out quality
    """
    from zero2all.corpus.filters.quality import train_quality
    from zero2all.corpus.ingest import document_texts

    learned = train_quality(document_texts(good), document_texts(bad), out)
    return Result({"out": str(out), **learned}, f"written to {out}.npz: {learned}")


@app.callback()
def group() -> None:
    """Raw files to documents."""


@app.command()
@command
def build(
    recipe: RecipePath,
    overrides: Overrides = None,
    engine: EngineKind = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    json: Json = False,
) -> Result:
    """Read, clean and deduplicate every source of the recipe into Parquet documents.

    Example: z2a corpus build my.yaml corpus.holdout=0.02
    """
    from zero2all.corpus import build_corpus, useful_workers
    from zero2all.engine import Engine
    from zero2all.recipe import load_recipe
    from zero2all.units import show_bytes

    loaded = load_recipe(recipe, overrides)
    chosen = Engine(engine, workers or useful_workers(loaded.corpus), ray_address)
    manifest = build_corpus(loaded.corpus, loaded.documents_dir, chosen)
    text = f"{manifest['documents']} documents, {show_bytes(manifest['bytes'])} in {loaded.documents_dir}"
    return Result({"out": str(loaded.documents_dir), **manifest}, text + (" (unchanged)" if manifest["reused"] else ""))


@app.command()
@command
def sniff(path: FilePath, json: Json = False) -> Result:
    """Look at a file and say what it is, what its records hold, and how to name it in a recipe.

    Example: z2a corpus sniff raw/pages.jsonl.zst
    """
    from zero2all.corpus.sniff import sniff as look
    from zero2all.units import show_bytes

    found = look(path)
    packed = f", {found['compression']}" if found.get("compression") else ""
    encoding = f", {found['encoding']}" if found.get("encoding") else ""
    lines = [f"{found['file']}: {found.get('format', 'not read')}{packed}{encoding}, {show_bytes(found['bytes'])}"]
    if "unreadable" in found:
        return Result(found, "\n".join([*lines, f"left out: {found['unreadable']}"]))
    lines += [f"  {name}  {shown[:80]!r}" for name, shown in found["fields"].items()]
    lines += [f"  broken: {place}" for place in found["broken"]]
    return Result(found, "\n".join([*lines, "", "for the recipe:", found["source"]]))


@app.command()
@command
def report(
    documents: Annotated[
        Path, typer.Argument(help="A directory made by 'z2a corpus build'.", metavar="DOCUMENTS", parser=to_path)
    ],
    html: Annotated[Path | None, typer.Option("--html", help="The page; DOCUMENTS.html if not given.")] = None,
    json: Json = False,
) -> Result:
    """Show where the text went, and samples of what was kept and dropped, as one HTML page.

    Example: z2a corpus report runs/first/documents --html report.html
    """
    from zero2all.corpus.report import corpus_report
    from zero2all.corpus.report_page import report_html
    from zero2all.io import write_text

    page = html or documents.with_name(documents.name + ".html")
    found = corpus_report(documents)
    write_text(page, report_html(found))
    return Result({**found, "html": str(page)}, f"written to {page}")
