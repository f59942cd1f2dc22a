"""API keys: their creation, and the hash that a gateway keeps."""

from __future__ import annotations

import hashlib
import re
import secrets

PREFIX = "slipstream-"
"""Lets scanners for secrets recognise a key in repositories and logs."""
KEY_BYTES = 32
KEY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Valid names of a key and its tenant."""


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: str) -> bytes:
    """SHA-256, plain: a key is 256 random bits, so there is no dictionary to try and nothing for salt or a slow hash to
    protect; a slow one would only let strangers burn the gateway's time."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
