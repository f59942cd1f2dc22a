"""Every reason that a program may read stands in docs/protocol.md, and no error without one says "invalid argument"."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from slipstream import errors

ROOT = Path(__file__).parents[3]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
PACKAGES = ("gateway", "slipstream", "measurement", "verifier_svc", "drafter_svc")
REASON = re.compile(r"[A-Z][A-Z_]+")
HTTP = {"RequestTooLarge", "RequestTimeout", "MethodNotAllowed"}
# What ends a process at its start, or a command: wrong settings, arguments and files, whose sentence names them.
AT_START = (
    re.compile(r".*/(config|api_keys|discovery|experiment|rules|address|address_allowlist|vllm_follower)\.py"),
    re.compile(r"(slipstream/(cli|client|engine|proposers|serving|telemetry)|measurement|verifier_svc/execution)/.*"),
    re.compile(r"slipstream/(config|rpc/tls|speculation/lookahead_window)\.py|gateway/api/http/server\.py"),
)


SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "_pb2" not in path.name
}
CONSTANTS = dict(
    found.groups()
    for text in SOURCES.values()
    for found in re.finditer(r'^([A-Z_]+) = "([A-Z_]+)"$', text, re.MULTILINE)
)
"""Words that have a name, by it."""


@cache
def calls() -> list[tuple[str, ast.Call, str]]:
    """(file, call, name of what is called) of every call in the services and the library."""
    return [
        (file, node, node.func.id)
        for file, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


def reasons_of(node: ast.expr) -> set[str]:
    """The reasons that an expression may be: literals in it, and constants."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and REASON.fullmatch(part.value):
            found.add(part.value)
        elif isinstance(part, ast.Name) and part.id.isupper():
            found.add(CONSTANTS[part.id])
    return found


def named_reasons() -> dict[str, str]:
    """Every reason that the sources name, and one file that does."""
    found: dict[str, str] = {}
    for file, call, _ in calls():
        for keyword in call.keywords:
            if keyword.arg == "reason":
                found |= dict.fromkeys(reasons_of(keyword.value), file)
    return found


def test_every_reason_is_in_the_document() -> None:
    named = named_reasons()
    assert len(named) > 100 and {"ROLLED_BACK", "PROMPT_TOO_LONG", "KEY_PROMPT", "MESSAGE_TOO_LARGE"} <= set(named)
    missing = {reason: file for reason, file in named.items() if f"`{reason}`" not in PROTOCOL}
    assert not missing, "docs/protocol.md lacks these reasons"


def test_the_document_names_no_reason_that_is_never_sent() -> None:
    table = PROTOCOL[PROTOCOL.index("## Errors") :]
    written = {name for name in re.findall(r"`([A-Z][A-Z_]+)`", table) if not name.startswith("GATEWAY_")}
    quoted = {word for text in SOURCES.values() for word in re.findall('"([A-Z_]+)"', text)}
    codes = {kind.code.name for kind in errors.SlipstreamError.__subclasses__()} | {"UNIMPLEMENTED", "CANCELLED"}
    assert written - quoted - codes == set()


def test_every_refusal_of_a_request_has_a_reason_of_its_own() -> None:
    wordless = [
        f"{file}:{call.lineno}"
        for file, call, name in calls()
        if name in {"InvalidArgument", "NotFound", "OutOfRange", "FailedPrecondition", "Aborted", *HTTP}
        if not any(keyword.arg == "reason" for keyword in call.keywords)
        if not any(pattern.fullmatch(file) for pattern in AT_START)
    ]
    assert not wordless, "errors without a reason of their own"
