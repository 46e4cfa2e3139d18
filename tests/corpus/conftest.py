from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """An empty directory for the files of a source."""
    directory = tmp_path / "raw"
    directory.mkdir()
    return directory
