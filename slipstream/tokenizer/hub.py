"""Whether Hugging Face's hub can be reached, asked once: its libraries ask again for a minute before they look into the
cache, for each file."""

from __future__ import annotations

import logging
import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

log = logging.getLogger(__name__)

OFFLINE = "HF_HUB_OFFLINE"
DEFAULT_ENDPOINT = "https://huggingface.co"
CONNECT_S = 3.0
"""Seconds that a first connection may take."""


@cache
def reachable() -> bool:
    """Whether models can be had from the hub. Where it does not answer, the libraries of this process, and of those
    that it starts, take what is in the cache alone."""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    place = urlsplit(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
    proxies = getproxies()
    through = proxies.get(place.scheme) or proxies.get("all")
    near = urlsplit(through if "//" in through else f"//{through}") if through else place
    try:
        port = near.port or (443 if near.scheme == "https" else 80)
        socket.create_connection((near.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        log.warning("%s cannot be reached (%s): models are taken from the cache alone", place.netloc, error)
        go_offline()
        return False
    return True


def go_offline() -> None:
    os.environ[OFFLINE] = "1"
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:  # it read the variable when imported
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
