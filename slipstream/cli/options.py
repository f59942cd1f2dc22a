"""Options that several commands share, the connection to gateways, and the error that ends a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from slipstream.client.async_client import LOCAL, ClientOptions
from slipstream.client.client import RetrySettings
from slipstream.client.gateway_endpoint import GatewayEndpoint, sampled_parent
from slipstream.client.sync_client import Client
from slipstream.errors import SlipstreamError
from slipstream.telemetry.spans import UNSENT_PARENT

INSTALL_ALL = "the client alone does without; run: pip install 'slipstream-serve[gateway,drafter,verifier]'"
CONNECTION, SAMPLING, SPECULATION, FORMAT = "Connection", "Sampling", "Speculation", "Output format"
"""Groups of options in `--help`."""
Server = Annotated[str, typer.Option(help="HOST:PORT of the gateway.", rich_help_panel=CONNECTION)]
Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--server",
        help="HOST:PORT of a gateway; repeat it to continue on another one if the first fails.",
        rich_help_panel=CONNECTION,
    ),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_API_KEY",
        help="API key; prefer the variable, options are visible in `ps`.",
        rich_help_panel=CONNECTION,
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Connect with TLS; the system must trust the gateway's certificate.",
        rich_help_panel=CONNECTION,
    ),
]
Ca = Annotated[
    str,
    typer.Option(
        envvar="SLIPSTREAM_CA",
        help="PEM file of the CA that signed the gateway's certificate, for the name in SLIPSTREAM_SERVER_NAME if set.",
        rich_help_panel=CONNECTION,
    ),
]
PlaintextKey = Annotated[
    bool,
    typer.Option(
        "--plaintext-key",
        envvar="SLIPSTREAM_PLAINTEXT_KEY",
        help="Send the key without TLS to other machines too; only on a network that is yours.",
        rich_help_panel=CONNECTION,
    ),
]
Model = Annotated[str, typer.Option(help="Model name; default: the gateway's only model.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most output tokens.", min=1)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default 1.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the likeliest tokens up to this total probability.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed of the sampling: the same seed gives the same text. Default: random.",
        min=0,
        rich_help_panel=SAMPLING,
    ),
]
NoSpeculation = Annotated[
    bool,
    typer.Option("--no-speculation", help="Plain decoding, without drafters.", rich_help_panel=SPECULATION),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option("--drafter", help="Name of a drafter to use; repeat for more.", rich_help_panel=SPECULATION),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Workload = Annotated[str, typer.Option(help="Kind of request: acceptance is measured and rules apply for each kind.")]
MaxDraftTokens = Annotated[
    int | None, typer.Option(help="Most candidate tokens in one round.", min=0, rich_help_panel=SPECULATION)
]


@dataclass(frozen=True)
class Connection:
    """Options of a command that calls gateways; the local one by default."""

    server: Servers = None
    api_key: ApiKey = ""
    tls: Tls = False
    ca: Ca = ""
    plaintext_key: PlaintextKey = False

    def client(self, *, trace: bool = False, resume_s: float = 30.0) -> Client:
        """`trace`: requests are traced where the gateway lets clients ask for that."""
        retry = RetrySettings(resume_s=resume_s, begin_anywhere=True)
        options: ClientOptions = {
            "api_key": self.api_key,
            "tls": self.tls,
            "ca": self.ca,
            "plaintext_key": self.plaintext_key,
            "retry": retry,
        }
        if trace:  # this process sends no span: what it names as the parent would be missing in the trace
            options |= {"traceparent": sampled_parent(), "tracestate": UNSENT_PARENT}
        return Client(self.server or [LOCAL], **options)

    def endpoints(self) -> list[GatewayEndpoint]:
        return [
            GatewayEndpoint(server, self.api_key, self.tls, self.ca, plaintext_key=self.plaintext_key)
            for server in self.server or [LOCAL]
        ]


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: a parameter that is a dataclass stands for its fields, each an option."""
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            options += inspect.signature(kind, eval_str=True).parameters.values()
        else:
            options.append(parameter)

    @wraps(command)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
        command(**given)

    keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return call


@contextmanager
def explained(command: str) -> Iterator[None]:
    """A typed error ends the command with one sentence, its reason and exit status 1."""
    try:
        yield
    except SlipstreamError as error:
        typer.echo(f"slipstream {command}: {error.message} [{error.reason}]", err=True)
        raise typer.Exit(1) from error
    except ModuleNotFoundError as error:
        typer.echo(f"slipstream {command}: {error.name} is not installed; {INSTALL_ALL}. [NOT_INSTALLED]", err=True)
        raise typer.Exit(1) from error


def need_installed(*modules: str) -> None:
    """Raises ModuleNotFoundError for the first module that the client's own installation lacks."""
    for module in modules:
        if find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
