"""Findings of checks, with their fixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """``note`` may reduce speed; ``bad`` would fail the job."""

    level: Level
    what: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        sign = {"good": "ok  ", "note": "note", "bad": "BAD "}[self.level]
        return f"{sign} {self.what}: {self.text}" + (f"\n     {self.fix}" if self.fix else "")


def finding_if(wrong: bool, level: Level, what: str, text: str, fix: str) -> Finding:
    """The finding with its fix if something is wrong, else the same text as a good finding."""
    return Finding(level, what, text, fix) if wrong else Finding("good", what, text)
