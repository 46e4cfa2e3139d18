"""Redaction of secrets: passwords, keys and signatures inside URLs, and secrets of the environment."""

from __future__ import annotations

import os
import re

REDACTED = "***"
# Every repetition is bounded, so that a malicious text cannot cause catastrophic backtracking.
_USER = r"""://[^\s/:@?#\[\]"']{0,256}:"""
# scheme://user:password@, where a password may contain "@" and, unless it looks like a port, "/".
_PASSWORD = re.compile(
    rf"""(\b[a-z][a-z0-9+.-]{{0,20}}{_USER})(?:[^\s/"']{{1,512}}@|(?!\d+[/?#])[^\s@"']{{1,512}}@)""", re.IGNORECASE
)
_STORE_KEYS = re.compile(rf"""(\b(?:s3[an]?|gs|gcs|az|abfss?){_USER})[^\s@"']{{1,512}}@""", re.IGNORECASE)  # no ports
_TOKEN = re.compile(r"""(\bhttps?://)[^\s/:@?#"']{1,512}@""", re.IGNORECASE)
_PARAMETER = re.compile(
    r"""([?&](?:[\w.-]{0,64}(?:signature|secret|password|passwd|credential|token)|sig|api[_-]?key|auth)=)[^\s&#"',;]+""",
    re.IGNORECASE,
)

# Variables whose value is a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, WANDB_API_KEY, Z2A_JOB_SECRET. Not paths to one.
_SECRET_VARIABLE = re.compile(
    r"(?:\w*_)?(?:TOKEN|SECRET|SECRET_ACCESS_KEY|PASSWORD|PASSWD|API_KEY|SECRET_KEY)", re.IGNORECASE
)
_MIN_SECRET = 8  # characters; a shorter value may be a word of any text


def redact(text: str) -> str:
    """
    >>> redact("http://bob:secret@host/a?X-Amz-Signature=0a1b")
    'http://bob:***@host/a?X-Amz-Signature=***'
    """
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET and value in text and _SECRET_VARIABLE.fullmatch(name):
            text = text.replace(value, REDACTED)
    if "://" not in text:
        return text
    for pattern in (_PASSWORD, _STORE_KEYS, _TOKEN):
        text = pattern.sub(rf"\1{REDACTED}@", text)
    return _PARAMETER.sub(rf"\1{REDACTED}", text)


def is_redacted(url: str) -> bool:
    """Whether a URL came from ``redact``, so that its secret is no longer in it."""
    return any(mark in url for mark in (f":{REDACTED}@", f"/{REDACTED}@", f"={REDACTED}"))
