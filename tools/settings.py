"""`python -m tools.settings > docs/settings.md`: every setting, as its dataclass and its docstring say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from itertools import pairwise

import drafter_svc.config
import gateway.config
import verifier_svc.config
from slipstream.rpc.tls import TlsConfig
from slipstream.telemetry.span_exporters import TraceConfig

CONFIGS: Mapping[str, tuple[str, type]] = {
    "Gateway": (gateway.config.PREFIX, gateway.config.GatewayConfig),
    "Verifier": (verifier_svc.config.PREFIX, verifier_svc.config.VerifierConfig),
    "Drafter": (drafter_svc.config.PREFIX, drafter_svc.config.DrafterConfig),
    "Certificates, of every role": ("SLIPSTREAM_TLS_", TlsConfig),
    "Traces, of every role": ("SLIPSTREAM_TRACE_", TraceConfig),
}
"""By heading: the prefix of the variables, and what they are read into."""
TOP = """# Settings

Every service reads environment variables and nothing else; a variable that begins with a role's prefix and is none of
these stops the service with a sentence that lists them. Lists are separated by commas; of truth values `true` and
`false`, `1` and `0`, `yes` and `no` are known. Names in the last column such as `gateway.routing.rules` are modules,
whose first lines say more.

Beside these: the standard `OTEL_*` (`docs/tracing.md`); `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` as the hub's library
reads them; `OMP_NUM_THREADS`, which `*_THREADS` overrides for torch; and for clients `SLIPSTREAM_API_KEY`.

Made by `python -m tools.settings` of the dataclasses; edit there."""
HEAD = "| variable | default | meaning |\n|---|---|---|"


def document() -> str:
    parts = [TOP, *(f"## {heading}\n\n{table(*config)}" for heading, config in CONFIGS.items())]
    return "\n\n".join(parts) + "\n"


def table(prefix: str, kind: type) -> str:
    said = dict(docstrings(kind))
    rows = [
        f"| `{prefix}{field.name.upper()}` | {default(field)} | {said.get(field.name, '')} |"
        for field in dataclasses.fields(typing.cast("typing.Any", kind))
    ]
    return "\n".join([HEAD, *rows])


def docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Fields of a class with the string below each, on one line."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                yield name, " ".join(said.split())


def default(field: dataclasses.Field[object]) -> str:
    match field.default:
        case dataclasses.MISSING:
            return "must be set"
        case "" | ():
            return "empty"
        case float() as number:
            return f"`{number:g}`"
        case other:
            return f"`{other}`".lower()


if __name__ == "__main__":
    print(document(), end="")
