"""Personal data in prose, and secrets in code."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Literal

from zero2all.base.plugins import register
from zero2all.corpus.document import Document
from zero2all.corpus.filters.filter_registry import KEEP, Change, Drop, FilterResult
from zero2all.corpus.filters.text_kinds import classify_text

# ASCII digits and letters only: numbers in other scripts are not what these forms are printed in.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@((?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})(?![A-Za-z0-9])", re.ASCII)
_MOBILE = re.compile(r"(?<![\d.+])(?:\+?86[- ]?)?1[3-9]\d([- ]?)\d{4}\1\d{4}(?![\d.]\d|\d)", re.ASCII)
_CHINESE_ID = re.compile(
    r"(?<![\dA-Za-z])[1-9]\d{5}(?:18|19|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\d{3}[\dXx](?![\dA-Za-z])",
    re.ASCII,
)
_CARD = re.compile(
    r"(?<![\d.-])(?:2[2-7]|3[0-9]|4\d|5[1-5]|6\d)\d{2}"
    r"(?:([ -]?)\d{4}\1\d{4}\1\d{1,7}|([ -])\d{6}\2\d{5}|\d{11})(?![\d-])",
    re.ASCII,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", re.ASCII)
# Any of them. Without lookbehind, so that text without such numbers is skipped at full speed.
_SUSPICIOUS_NUMBER = re.compile(r"[0-9](?:[0-9]{2}[ -]?[0-9]{4}[ -]?[0-9]{3}|\.[0-9]{1,3}\.[0-9])")
_IN_EMAIL = re.compile(r"@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2}")

_RESERVED_DOMAIN = re.compile(
    r"(?:^|\.)(?:example\.(?:com|org|net)|test|example|invalid|localhost|local)$", re.IGNORECASE
)
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
MIN_ENTROPY = 3.8  # bits per character
_MIN_LARGEST_OCTET = 64  # 3.2.1.4 is a section or a version


_Mask = Callable[[re.Match[str]], str]


@register("filter", "pii")
def pii(document: Document, *, in_code: bool = False) -> FilterResult:
    """Mask mail addresses, Chinese mobile and identity numbers, bank card numbers and public IPv4 addresses.

    They become ``<email>``, ``<phone>``, ``<id_number>``, ``<card>`` and ``<ip>``. Identity numbers must have a valid
    check digit and card numbers must pass Luhn's test. Example domains, private and reserved addresses, and dotted
    numbers that look like a section or a version stay. Code is left alone unless asked: there it is test data.
    """
    if not in_code and classify_text(document) == "code":
        return KEEP
    text = document.content
    if _SUSPICIOUS_NUMBER.search(text):
        for pattern, mask in _NUMBERS:
            text = pattern.sub(mask, text)
    if "@" in text and _IN_EMAIL.search(text):
        text = _EMAIL.sub(lambda found: found[0] if _RESERVED_DOMAIN.search(found[1]) else "<email>", text)
    return KEEP if text == document.content else Change(text, "personal data masked")


def _mask_if(is_one: Callable[[str], bool], placeholder: str) -> _Mask:
    return lambda found: placeholder if is_one(found[0]) else found[0]


def _is_chinese_id(number: str) -> bool:
    """GB 11643: the last of 18 places checks the 17 before it, modulo 11."""
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, number[:17], strict=True))
    return "10X98765432"[total % 11] == number[17].upper()


def _is_card(number: str) -> bool:
    """Luhn: every second digit from the right doubled; the sum of all digits ends in 0."""
    digits = [int(char) for char in number if char.isdigit()]
    doubled = [digit if place % 2 == 0 else sum(divmod(2 * digit, 10)) for place, digit in enumerate(reversed(digits))]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and sum(doubled) % 10 == 0


def _is_public_address(dotted: str) -> bool:
    octets = [int(part) for part in dotted.split(".")]
    if (
        max(octets) > 255
        or max(octets) < _MIN_LARGEST_OCTET
        or any(len(part) > 1 and part[0] == "0" for part in dotted.split("."))
    ):
        return False
    address = ipaddress.IPv4Address(dotted)
    return address.is_global and not address.is_multicast


_NUMBERS: tuple[tuple[re.Pattern[str], _Mask], ...] = (
    (_CHINESE_ID, _mask_if(_is_chinese_id, "<id_number>")),
    (_CARD, _mask_if(_is_card, "<card>")),
    (_MOBILE, lambda found: "<phone>"),
    (_IPV4, _mask_if(_is_public_address, "<ip>")),
)

# A key ends at the next five dashes: then every position is read for one header only, whatever the text repeats.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]{2,10} ){0,2}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[A-Za-z0-9+/=:,. \\\n\r\t\"']|-(?!----)){64,20000}-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{50,255}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{20,255}"  # Slack
    r"|AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z_-]{30,500}"  # Google
    r"|sk_live_[0-9A-Za-z]{20,255}|glpat-[0-9A-Za-z_-]{20,64}"  # Stripe, GitLab
    r")(?![A-Za-z0-9_-])"
)
_TOKEN_STARTS = (
    *("AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    *("xox", "AIza", "ya29.", "sk_live_", "glpat-"),
)
# The value first: quotes with one long word in them are rare, names like api_key are not.
_QUOTED_VALUE = re.compile(r"[\"']([A-Za-z0-9+/=_.~-]{20,200})[\"']")
_ASSIGNED_TO_SECRET = re.compile(
    r"(?:api|access|auth|secret|private|client)[_-]?(?:key|token|secret)[\"']?\s{0,4}(?:=|:|=>|:=)\s{0,4}$",
    re.IGNORECASE,
)
_PLACEHOLDER_SECRET = re.compile(
    r"example|sample|dummy|changeme|your|xxxx|test|fake|placeholder|abcdef|012345|123456", re.IGNORECASE
)


@register("filter", "secrets")
def secrets(document: Document, *, action: Literal["drop", "mask"] = "drop") -> FilterResult:
    """Drop, or mask as ``<secret>``, private keys and tokens of AWS, GitHub, GitLab, Google, Slack and Stripe.

    In code also a long random value given to a name like ``api_key``: at least 3.8 bits a character,
    with digits and letters. Values that say that they are examples stay, and so does a key's header without a key.
    """
    text = document.content
    masked = text
    if "PRIVATE KEY" in text:
        masked = _PRIVATE_KEY.sub("<secret>", masked)
    if any(start in text for start in _TOKEN_STARTS):
        masked = _TOKEN.sub(lambda found: found[0] if _PLACEHOLDER_SECRET.search(found[0]) else "<secret>", masked)
    if classify_text(document) == "code":
        masked = _QUOTED_VALUE.sub(_mask_assigned, masked)
    if masked == text:
        return KEEP
    return Drop("secret") if action == "drop" else Change(masked, "secrets masked")


def _mask_assigned(found: re.Match[str]) -> str:
    value, before = found[1], found.string[max(0, found.start() - 60) : found.start()]
    if not _ASSIGNED_TO_SECRET.search(before):
        return found[0]
    is_mixed = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    if not is_mixed or _PLACEHOLDER_SECRET.search(value) or _entropy(value) < MIN_ENTROPY:
        return found[0]
    return found[0].replace(value, "<secret>")


def _entropy(value: str) -> float:
    """Bits a character, by how often each occurs."""
    return -sum(count / len(value) * math.log2(count / len(value)) for count in Counter(value).values())
