"""The cache salts that name a tenant to the workers, which never learn more of it."""

from __future__ import annotations

import hashlib
import re

_SALT = re.compile(r"([0-9a-f]{12})\.[0-9a-f]{51}")
"""64 characters, as many as a label may have."""


def tenant_salt(name: str, asked: str) -> str:
    """The salt of a tenant's requests that asked for this one. Another tenant's differs, whatever it asks for."""
    whole = hashlib.sha256(f"{name}\0{asked}".encode()).hexdigest()
    return f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.{whole[:51]}"


def tenant_of(salt: str) -> str:
    """What all salts of one tenant have in common; empty where there are no tenants, as behind an open gateway."""
    found = _SALT.fullmatch(salt)
    return found.group(1) if found else ""
