"""What a check found: in the doctor, the health checks, profiles, plans and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "bad"]
COLOURS: dict[Level, str] = {"good": "green", "note": "yellow", "bad": "red"}
SIGNS: dict[Level, str] = {"good": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """``note`` may cost speed or quality; ``bad`` fails the job or spoils its result. In a terminal: ``str``."""

    level: Level
    what: str
    why: str
    remedy: str = ""
    step: int | None = None
    """The step that it points at."""
    chinese: str = ""
    """Reason and remedy, where the live page shows them."""

    @property
    def text(self) -> str:
        return f"{self.why}; {self.remedy}" if self.remedy else self.why

    def __str__(self) -> str:
        return f"{SIGNS[self.level]} {self.what}: {self.why}" + (f"\n     {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class PageFinding:
    """A finding as the live page reads it."""

    rule: str
    level: Level
    text: str
    text_zh: str
    step: int | None


def page_finding(finding: Finding) -> PageFinding:
    return PageFinding(finding.what, finding.level, finding.text, finding.chinese or finding.text, finding.step)


def finding_if(*, wrong: bool, level: Level, what: str, why: str, remedy: str) -> Finding:
    """The finding with its remedy if something is wrong, else the same text as a good finding."""
    return Finding(level, what, why, remedy) if wrong else Finding("good", what, why)
