"""Options and output of ``z2a corpus fetch``."""

from __future__ import annotations

import os
import re

import yaml

from zero2all.cli.conventions import Result, parse_size
from zero2all.corpus.fetch import FetchOptions, FetchResult
from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.corpus.fetch.sources import HUB_ENDPOINT, FileSelection
from zero2all.errors import UsageError
from zero2all.units import show_bytes, show_seconds


def fetch_options(
    include: list[str] | None,
    exclude: list[str] | None,
    revision: str,
    mirror: str | None,
    workers: int,
    sha256: str | None,
    max_size: str | None,
) -> FetchOptions:
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UsageError("--sha256: write the 64 hexadecimal digits of the checksum")
    return FetchOptions(
        selection=FileSelection(tuple(include or ()), tuple(exclude or ())),
        endpoint=mirror or os.environ.get("HF_ENDPOINT") or HUB_ENDPOINT,
        token=os.environ.get("HF_TOKEN", "").strip() or None,
        revision=revision,
        workers=workers,
        sha256=sha256,
        max_size=parse_size("--max-size", max_size),
    )


def listed(files: list[RemoteFile]) -> Result:
    known = [file.size for file in files if file.size is not None]
    unknown = f", {len(files) - len(known)} of unknown size" if len(known) < len(files) else ""
    lines = [f"{'?' if file.size is None else show_bytes(file.size):>8}  {file.path}" for file in files]
    data = {"files": [{"path": file.path, "size": file.size} for file in files], "bytes": sum(known)}
    return Result(data, "\n".join([*lines, f"{show_bytes(sum(known)):>8}  in {len(files)} files{unknown}"]))


def fetched(result: FetchResult) -> Result:
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
