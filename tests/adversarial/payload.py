"""A pickle that does harm, as far as a test can see it: made by a test, for its own directory, never stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class Payload:
    """Unpickled, it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)
