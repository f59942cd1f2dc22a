"""Calls of the API server, as JSON."""

from __future__ import annotations

import json
import ssl
import time
import urllib.request
from collections.abc import Callable
from typing import Any

Object = dict[str, Any]
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
ANSWER_S = 10.0


class Api:
    """One server, and a token for it."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token
        self._tls = ssl.create_default_context()
        self._tls.check_hostname = False  # it makes its certificate itself, and is on this machine
        self._tls.verify_mode = ssl.CERT_NONE

    def call(self, method: str, path: str, body: Object | None = None, kind: str = "application/json") -> Object:
        """Raises urllib.error.HTTPError for a refusal, OSError where nobody answers."""
        headers = {"authorization": f"Bearer {self.token}", "content-type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_S, context=self._tls) as answer:
            read: Object = json.load(answer)
        return read

    def items(self, path: str) -> list[Object]:
        found: list[Object] = self.call("GET", path)["items"]
        return found


def wait(condition: Callable[[], object], what: str, seconds: float) -> float:
    """Seconds until the condition held. Raises AssertionError that says what did not happen."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.3)
    return time.monotonic() - began
