"""What looks like a secret: it may not stand in a recipe or a manifest, and is masked where text is shown."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY(_ID)?|SECRET_KEY|PRIVATE_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{10,200}\.eyJ"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY|://[^/\s:@]{1,200}:[^/\s@]{1,200}@"
)  # every repetition is bounded or the last: texts of a megabyte are looked through
_NAMED = re.compile(
    r"""(["']?\b[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY(?:_ID)?|PRIVATE_KEY|CREDENTIALS?)["']?\s*[:=]\s*)"""
    r"""("[^"]*"|'[^']*'|[^,}\s]+)"""
)
_SHORTEST = 8
MASK = "***"


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value is a secret: by its name, or by what it looks like.

    A path (`/var/...`), a special token of a tokenizer (`<pad>`) and a number are none.
    """
    named = _NAME.search(name) is not None and len(value) >= _SHORTEST
    return (named and value[0] not in "/<" and not value.isdigit()) or has_secret(value)


def has_secret(text: str) -> bool:
    """Whether text holds what looks like a token or key of a known kind."""
    return _VALUE.search(text) is not None


def masked(text: str) -> str:
    """Text with what looks like a secret replaced by `***`."""
    return _NAMED.sub(lambda found: found[1] + MASK, _VALUE.sub(MASK, text))
