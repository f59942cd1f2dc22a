"""The Python client of a gateway, and what the services share: the contract, the candidate tree, the noise, the links.
Imports no service.

    with slipstream.Client("127.0.0.1:50051") as client:
        print(client.generate("def read(self, path):", max_tokens=64).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.client.async_client import AsyncClient, AsyncStream, RolledBack
    from slipstream.client.client import RetrySettings
    from slipstream.client.completion import Completion, Piece
    from slipstream.client.options import ChatOptions, GenerateOptions
    from slipstream.client.sync_client import Client, Stream
    from slipstream.errors import SlipstreamError

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "ChatOptions",
    "Client",
    "Completion",
    "GenerateOptions",
    "Piece",
    "RetrySettings",
    "RolledBack",
    "SlipstreamError",
    "Stream",
]

_MODULES = {
    "AsyncClient": "client.async_client",
    "AsyncStream": "client.async_client",
    "ChatOptions": "client.options",
    "Client": "client.sync_client",
    "Completion": "client.completion",
    "GenerateOptions": "client.options",
    "Piece": "client.completion",
    "RetrySettings": "client.client",
    "RolledBack": "client.async_client",
    "SlipstreamError": "errors",
    "Stream": "client.sync_client",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the services, which import this package too, need none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_MODULES[name]}"), name)
