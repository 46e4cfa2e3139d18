"""What must not be shown: passwords, keys and signatures inside URLs."""

from __future__ import annotations

import re

MASK = "***"
# Every repetition has a limit, so that a text which is made for it cannot keep us busy.
_USER = r"""://[^\s/:@?#\[\]"']{0,256}:"""
# scheme://user:password@, where a password may hold "@" and, unless it looks like a port, "/".
_PASSWORD = re.compile(
    rf"""(\b[a-z][a-z0-9+.-]{{0,20}}{_USER})(?:[^\s/"']{{1,512}}@|(?!\d+[/?#])[^\s@"']{{1,512}}@)""", re.IGNORECASE
)
_STORE_KEYS = re.compile(rf"""(\b(?:s3[an]?|gs|gcs|az|abfss?){_USER})[^\s@"']{{1,512}}@""", re.IGNORECASE)  # no ports
_TOKEN = re.compile(r"""(\bhttps?://)[^\s/:@?#"']{1,512}@""", re.IGNORECASE)
_PARAMETER = re.compile(
    r"""([?&](?:[\w.-]{0,64}(?:signature|secret|password|passwd|credential|token)|sig|api[_-]?key|auth)=)[^\s&#"',;]+""",
    re.IGNORECASE,
)


def mask(text: str) -> str:
    """
    >>> mask("http://bob:secret@host/a?X-Amz-Signature=0a1b")
    'http://bob:***@host/a?X-Amz-Signature=***'
    """
    if "://" not in text:
        return text
    for pattern in (_PASSWORD, _STORE_KEYS, _TOKEN):
        text = pattern.sub(rf"\1{MASK}@", text)
    return _PARAMETER.sub(rf"\1{MASK}", text)


def is_masked(url: str) -> bool:
    """Whether a URL came from ``mask``, so that its secret is not in it any more."""
    return any(mark in url for mark in (f":{MASK}@", f"/{MASK}@", f"={MASK}"))
