"""Human-readable numbers: 64Ki tokens, 200MB, 2 epochs, 1.1B."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

_FACTORS = {
    "": 1,
    "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*+([0-9][0-9_,]*+(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)\s*+([A-Za-z]*+)\s*+")


INT64_LIMIT = 2**63


def parse_count(value: Any) -> int:
    """``65536``, ``"64Ki"``, ``"10M"``, ``"1.1B"`` -> int."""
    return _parse(value, "a count such as 4096, 64Ki or 10M", strip_bytes=False)


def parse_bytes(value: Any) -> int:
    """``"200MB"``, ``"2GiB"``, ``4096`` -> int."""
    return _parse(value, "a size such as 200MB or 2GiB", strip_bytes=True)


def _parse(value: Any, wanted: str, *, strip_bytes: bool) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"write {wanted}")
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        raise ValueError(f"{str(value)[:40]!r} is not {wanted}")
    digits, suffix = match[1].replace("_", "").replace(",", ""), match[2].upper()
    if strip_bytes:
        suffix = suffix.removesuffix("B")
    if suffix not in _FACTORS:
        raise ValueError(f"{value!r} is not {wanted}")
    shown = repr(value) if len(str(value)) <= 40 else f"{str(value)[:40]!r}..."
    try:
        number = Decimal(digits) * _FACTORS[suffix]
    except ArithmeticError:  # an exponent beyond Decimal's range
        raise ValueError(f"{shown} is too large") from None
    if number >= INT64_LIMIT:  # before it is made an integer, which may have a billion digits
        raise ValueError(f"{shown} is too large")
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def show_count(number: float) -> str:
    """``1_100_000_000`` -> ``"1.10B"``."""
    for suffix, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(number) >= factor:
            scaled = number / factor
            return f"{scaled:.0f}{suffix}" if abs(scaled) >= 99.995 else f"{scaled:.2f}{suffix}"
    return f"{number:g}"


def show_bytes(number: float) -> str:
    """``200_000_000`` -> ``"200MB"``."""
    text = show_count(number).replace("B", "G")
    return text + "B"


def show_number(number: float, digits: int = 6) -> str:
    """A number of an axis, as short as possible.

    >>> show_number(0.0003), show_number(2500), show_number(1_500_000)
    ('0.0003', '2500', '1.5M')
    """
    if abs(number) < 10 ** min(digits, 5):
        return f"{number:.{digits}g}"
    text = show_count(number)
    return f"{float(text[:-1]):g}{text[-1]}"


def show_seconds(seconds: float) -> str:
    """``3725`` -> ``"1h02m"``."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


Unit = Literal["steps", "tokens", "epochs"]


@dataclass(frozen=True)
class Duration:
    """A training duration in steps, tokens or epochs."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, value: Any) -> Duration:
        """``20``, ``"20 steps"``, ``"10M tokens"``, ``"1.5 epochs"``; a bare number is steps."""
        if isinstance(value, Duration):
            return value
        text = str(value).strip()
        for unit in get_args(Unit):
            for ending in (unit, unit[:-1]):
                if text.endswith(ending):
                    return cls._from_number(text.removesuffix(ending).strip(), unit)
        return cls._from_number(value, "steps")

    @classmethod
    def _from_number(cls, number: Any, unit: Unit) -> Duration:
        try:
            value = float(number) if unit == "epochs" else parse_count(number)
        except (TypeError, ValueError):
            raise ValueError(
                f"{str(number)[:40]!r} is not a duration such as 20 steps, 10M tokens or 2 epochs"
            ) from None
        if not 0 <= value < math.inf:
            raise ValueError(f"a duration cannot be {value}")
        return cls(value, unit)

    def in_steps(self, tokens_per_step: int, tokens_per_epoch: int) -> int:
        """Full steps that fit: a run never uses more data than requested."""
        per_unit = {"steps": 1.0, "tokens": 1 / tokens_per_step, "epochs": tokens_per_epoch / tokens_per_step}
        # The small term keeps 2 epochs of 10 steps at 20 where the division gives 19.999...
        return int(self.value * per_unit[self.unit] + 1e-9)

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}" if self.unit == "epochs" else f"{int(self.value)} {self.unit}"
