"""Metadata that depend on where the project is published: the links of the README, and project.urls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatch_fancy_pypi_readme import hooks
from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = r"(?![a-z]+:|//|#)"  # neither a URL nor a heading of the same page
IMAGE = rf"(!\[[^\]]*\]\(|\b(?:src|srcset)=\"){RELATIVE}"
LINK = rf"((?<!\\)\]\(|\bhref=\"){RELATIVE}"
PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}


class PublishedMetadata(MetadataHookInterface):
    """Reads ``repository``, the public address of the repository. Without one, links stay relative and there are no
    URLs."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, tag = self.config["repository"].rstrip("/"), f"v{metadata['version']}"
        substitutions = []
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Issues": f"{repository}/issues",
                **{name: f"{repository}/blob/{tag}/{path}" for name, path in PAGES.items()},
            }
            substitutions = [  # images first: what is left after them are links to pages
                {"pattern": IMAGE, "replacement": rf"\1{repository}/raw/{tag}/"},
                {"pattern": LINK, "replacement": rf"\1{repository}/blob/{tag}/"},
            ]
        readme = {"path": str(Path(self.root) / "README.md")}
        config = {"content-type": "text/markdown", "fragments": [readme], "substitutions": substitutions}
        hooks.FancyReadmeMetadataHook(self.root, config).update(metadata)
