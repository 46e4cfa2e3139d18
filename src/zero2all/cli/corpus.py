"""z2a corpus fetch | build | sniff | report | export | generate | quality train"""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zero2all.base.errors import UsageError
from zero2all.base.paths import to_path
from zero2all.cli.conventions import (
    Json,
    Overrides,
    Ray,
    RecipePath,
    Result,
    VerifyOutput,
    Workers,
    command,
    parse_size,
    resumable_command,
    task_engine,
)

if TYPE_CHECKING:
    from zero2all.corpus.fetch import FetchResult
    from zero2all.corpus.fetch.remote_file import RemoteFile

FilePath = Annotated[str, typer.Argument(help="The file, directory or URL to read.", metavar="PATH")]

app = typer.Typer(help="Turn raw files into clean, deduplicated documents.", no_args_is_help=True)


quality_app = typer.Typer(help="Train the classifier for the quality_score filter.", no_args_is_help=True)
app.add_typer(quality_app, name="quality")


@quality_app.callback()
def quality_group() -> None:
    """Train the classifier for the quality_score filter."""


@quality_app.command("train")
@command
def quality_train(
    good: Annotated[
        list[str], typer.Option("--good", help="High-quality text: a file, directory or URL. Can be repeated.")
    ],
    bad: Annotated[
        list[str], typer.Option("--bad", help="Low-quality text: a file, directory or URL. Can be repeated.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Write the classifier to OUT.npz and OUT.json.")],
    json: Json = False,
) -> Result:
    """Train a quality classifier from good and bad examples.

    Example: z2a corpus quality train --good books/ --bad crawl.jsonl --out quality
    """
    from zero2all.corpus.filters.quality_classifier import train_quality_model
    from zero2all.corpus.ingest import document_texts

    metadata = asdict(train_quality_model(document_texts(good), document_texts(bad), out))
    return Result({"out": str(out), **metadata}, f"written to {out}.npz: {metadata}")


@app.command()
@resumable_command
def fetch(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Dataset hf://datasets/OWNER/NAME[/PATH], model hf://OWNER/NAME[/PATH], or URL of a file.",
            metavar="SOURCE...",
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="The directory to download to. Default: none, for --list.", metavar="DIR", parser=to_path
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", help="Glob of files to download, such as 'data/en/*.parquet'. Repeatable. Default: all."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Glob of files to skip. Repeatable. Default: none.")
    ] = None,
    revision: Annotated[str, typer.Option("--revision", help="Branch, tag or commit on the Hub.")] = "main",
    mirror: Annotated[
        str | None,
        typer.Option("--mirror", help="URL of the Hub or a mirror of it. Default: HF_ENDPOINT, or huggingface.co."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=64, help="Number of files to download at the same time.")
    ] = 8,
    sha256: Annotated[
        str | None,
        typer.Option("--sha256", help="Expected checksum, if there is one file. Default: no check.", metavar="HEX"),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", help="Refuse larger files, such as 20GB. Default: no limit.", metavar="SIZE"),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the files and their sizes; download nothing.")
    ] = False,
    json: Json = False,
) -> Result:
    """Download datasets or files; the same command resumes.

    Files of the Hugging Face Hub go to DIR/NAME, other files to DIR. Checksums are verified, and DIR/fetch.json lists
    what was downloaded from where. HF_TOKEN is sent to the Hub or the mirror only.

    Example: z2a corpus fetch hf://datasets/Salesforce/wikitext --include wikitext-2-v1 --to raw
    """
    from zero2all.corpus.fetch import FetchOptions, fetch_files, list_files
    from zero2all.corpus.fetch.sources import HUB_ENDPOINT, FileSelection

    options = FetchOptions(
        selection=FileSelection(tuple(include or ()), tuple(exclude or ())),
        endpoint=mirror or os.environ.get("HF_ENDPOINT") or HUB_ENDPOINT,
        token=os.environ.get("HF_TOKEN", "").strip() or None,
        revision=revision,
        workers=workers,
        sha256=_checksum(sha256),
        max_size=parse_size("--max-size", max_size),
    )
    if list_only:
        return _listed(list_files(sources, options))
    if to is None:
        raise UsageError("say where to download to: --to DIR")
    return _fetched(fetch_files(sources, to, options))


@app.command()
@resumable_command
def build(
    recipe: RecipePath,
    overrides: Overrides = None,
    workers: Workers = None,
    ray: Ray = None,
    verify: VerifyOutput = False,
    json: Json = False,
) -> Result:
    """Read, filter and deduplicate all sources into Parquet.

    Example: z2a corpus build my.yaml corpus.holdout=0.02
    """
    from zero2all.base.units import show_bytes
    from zero2all.corpus import build_corpus, recommended_workers, summary_lines
    from zero2all.corpus.manifest import count_text
    from zero2all.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    chosen = task_engine(workers or recommended_workers(loaded.corpus), ray)

    def before_replace() -> None:
        from zero2all.train.data_in_use import warn_about_new_documents

        warn_about_new_documents(loaded)

    built = build_corpus(loaded.corpus, loaded.documents_dir, chosen, before_replace, verify=verify)
    unchanged = " (unchanged)" if built.reused else ""
    total = f"{count_text(built.documents, 'document')}, {show_bytes(built.bytes)} in {loaded.documents_dir}{unchanged}"
    return Result(
        {"out": str(loaded.documents_dir), "kind": "documents", **asdict(built)},
        "\n".join([*summary_lines(built), total]),
    )


@app.command()
@command
def sniff(path: FilePath, json: Json = False) -> Result:
    """Detect a file's format, fields and recipe entry.

    Example: z2a corpus sniff raw/pages.jsonl.zst
    """
    from zero2all.base.units import show_bytes
    from zero2all.corpus.sniff import sniff as sniff_file

    found = sniff_file(path)
    detected, content = found.detected, found.content
    known = [detected.format, detected.compression, detected.encoding] if detected else ["not read"]
    lines = [f"{found.file}: {', '.join(filter(None, known))}, {show_bytes(found.bytes)}"]
    if content is None:
        return Result(found.to_json(), "\n".join([*lines, f"skipped: {found.unreadable}"]))
    lines += [f"  {name}  {shown[:80]!r}" for name, shown in content.fields.items()]
    lines += [f"  broken: {place}" for place in content.broken]
    return Result(found.to_json(), "\n".join([*lines, "", "for the recipe:", content.source]))


@app.command()
@command
def report(
    documents: Annotated[
        Path, typer.Argument(help="The directory that 'z2a corpus build' wrote.", metavar="DOCUMENTS", parser=to_path)
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="The HTML file to write. Default: DOCUMENTS.html.")
    ] = None,
    json: Json = False,
) -> Result:
    """Write an HTML report of kept and dropped documents.

    The report lists counts and examples for each filter.

    Example: z2a corpus report runs/first/documents --html report.html
    """
    from zero2all.base.io import write_text
    from zero2all.corpus.corpus_report import corpus_report, report_html

    page = html or documents.with_name(documents.name + ".html")
    found = corpus_report(documents)
    write_text(page, report_html(found))
    return Result({**asdict(found), "html": str(page)}, f"written to {page}")


@app.command()
@command
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A recipe, the directory of a run, or the directory that 'z2a corpus build' wrote.",
            metavar="RECIPE|DOCUMENTS",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="The directory to write, local or in a store.", parser=to_path)],
    overrides: Overrides = None,
    export_format: Annotated[
        Literal["jsonl", "text"], typer.Option("--format", help="JSON lines, or plain text without any field.")
    ] = "jsonl",
    shard_size: Annotated[
        str | None,
        typer.Option(
            "--shard-size", help="Largest size of a file, such as 200MB. Default: one file per shard.", metavar="SIZE"
        ),
    ] = None,
    compression: Annotated[
        Literal["none", "gzip", "zstd"], typer.Option("--compression", help="Compression of the files.")
    ] = "none",
    json: Json = False,
) -> Result:
    """Write the documents as JSON lines or plain text.

    Example: z2a corpus export runs/first/documents --to exported --format jsonl --compression zstd
    """
    from zero2all.base.io import MANIFEST
    from zero2all.base.tasks import TaskEngine, available_cores
    from zero2all.base.units import show_bytes
    from zero2all.corpus.corpus_export import ExportOptions, export_documents
    from zero2all.corpus.manifest import count_text
    from zero2all.recipe import load_recipe

    options = ExportOptions(export_format, parse_size("--shard-size", shard_size), compression)
    documents = to_path(source)
    if not (documents / MANIFEST).exists():
        documents = load_recipe(Path(source), overrides).documents_dir
    engine = TaskEngine(workers=available_cores())
    exported = export_documents(documents, to, options, engine)
    counts = f"{count_text(exported.documents, 'document')}, {show_bytes(exported.bytes)}"
    text = f"{counts} in {count_text(len(exported.files), 'file')} in {to}"
    return Result({"out": str(to), **asdict(exported)}, text)


@app.command()
@resumable_command
def generate(
    seeds: Annotated[Path, typer.Argument(help="Conversations to start from, as JSON lines.")],
    to: Annotated[Path, typer.Option("--to", help="File of JSON lines to append to.")],
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="Name of the model at the endpoint.")],
    count: Annotated[int, typer.Option(min=1, help="Number of conversations that the file should have.")] = 100,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Number of requests at the same time.")] = 4,
    json: Json = False,
) -> Result:
    """Write new conversations with a model behind an endpoint.

    The model sees a few seed instructions, writes another one, and answers it (self-instruct). Instructions that are
    similar to earlier ones are dropped. The same command resumes. The key of the API is read from Z2A_API_KEY.

    Example: z2a corpus generate seeds.jsonl --to more.jsonl --endpoint http://127.0.0.1:8000/v1 --model qwen --count 50
    """
    from zero2all.corpus.generate import GenerateOptions, generate_conversations

    options = GenerateOptions(endpoint, model, count, workers=workers)
    made = generate_conversations(seeds, to, options)
    text = f"{made.total} conversations in {to}, {made.written} of them new; {made.too_similar} were too similar"
    return Result({"out": str(to), **asdict(made)}, text)


def _checksum(text: str | None) -> str | None:
    if text is not None and not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise UsageError("--sha256: write the 64 hexadecimal digits of the checksum")
    return text


def _listed(files: list[RemoteFile]) -> Result:
    from zero2all.base.units import show_bytes

    known = [file.size for file in files if file.size is not None]
    unknown = f", {len(files) - len(known)} of unknown size" if len(known) < len(files) else ""
    lines = [f"{'?' if file.size is None else show_bytes(file.size):>8}  {file.path}" for file in files]
    data = {"files": [{"path": file.path, "size": file.size} for file in files], "bytes": sum(known)}
    return Result(data, "\n".join([*lines, f"{show_bytes(sum(known)):>8}  in {len(files)} files{unknown}"]))


def _fetched(result: FetchResult) -> Result:
    import yaml

    from zero2all.base.units import show_bytes, show_seconds

    there = result.files - result.downloaded_files
    text = (
        f"{result.files} files, {show_bytes(result.bytes)} in {result.to}: "
        f"{show_bytes(result.downloaded_bytes)} downloaded in {show_seconds(result.seconds)}"
        + (f", {there} files were there already" if there else "")
    )
    if result.sources:
        sources = [
            source.model_dump(mode="json", exclude_unset=True, exclude_defaults=True) for source in result.sources
        ]
        entry = yaml.safe_dump({"corpus": {"sources": sources}}, allow_unicode=True, sort_keys=False)
        text += f"\n\nfor the recipe:\n{entry}\n'z2a corpus sniff {result.sources[0].paths[0]}' shows its fields"
    return Result(result, text)
