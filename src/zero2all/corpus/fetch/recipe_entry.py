"""The sources of a recipe that read what was downloaded."""

from __future__ import annotations

from pathlib import Path

from zero2all.corpus.fetch.hub import HubSource
from zero2all.corpus.fetch.remote_file import RemoteFile
from zero2all.corpus.fetch.sources import WebSource, parse_source
from zero2all.recipe import SourceRecipe
from zero2all.recipe.source_names import to_source_name

# About a dataset, not part of it.
_CARD_FILES = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "dataset_infos.json")


def recipe_sources(sources: list[str], files: list[RemoteFile], to: Path) -> list[SourceRecipe]:
    """One source for each dataset, and one for all files from web servers. Models are not text."""
    parsed = [parse_source(text) for text in dict.fromkeys(sources)]
    found = [
        _dataset_source(source, files, to)
        for source in parsed
        if isinstance(source, HubSource) and source.kind == "datasets"
    ]
    web = {source.text for source in parsed if isinstance(source, WebSource)}
    if paths := [str(to / file.path) for file in files if file.source in web]:
        found.append(SourceRecipe(name=to_source_name(to.resolve().name), paths=paths))
    return found


def _dataset_source(source: HubSource, files: list[RemoteFile], to: Path) -> SourceRecipe:
    paths = {file.path.removeprefix(f"{source.directory}/") for file in files if file.source == source.text}
    cards = [*_CARD_FILES, f"{source.directory}.py"]  # the last is a loading script
    exclude = [] if source.path else [name for name in cards if name in paths]
    return SourceRecipe(
        name=to_source_name(source.directory), paths=[str(to / source.directory / source.path)], exclude=exclude
    )
