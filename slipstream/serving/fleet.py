"""All roles of one machine, with their settings and addresses."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import typer

from slipstream.errors import FailedPrecondition, Unavailable
from slipstream.proposers.registry import IN_VERIFIER, METHODS, SPECULATOR
from slipstream.rpc import VERIFIER
from slipstream.serving.fit import check_fit
from slipstream.serving.loading import Loading
from slipstream.serving.options import EMBEDDED, FleetOptions
from slipstream.serving.role import READY, Role
from slipstream.tokenizer.chat_template_source import named_template

OWN_CORPUS = {"CORPUS_TOKENS": "100000"}
"""Requests with one cache salt help each other; others share nothing, for several people may use this machine."""
RESTART_S = 1.0
VERIFIER_WAIT_S = 120.0
"""Seconds that sessions wait for a verifier that is started again: it loads its model."""
VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Where `make setup-vllm` puts it."""
SOMEWHERE = "127.0.0.1:1"
"""Address in place of workers that have none yet."""


class Fleet:
    """Verifier and drafters first, both at once, then the gateway, with their addresses."""

    def __init__(
        self,
        target: str,
        drafters: Mapping[str, str],
        dtype: str,
        threads: int,
        options: FleetOptions | None = None,
        *,
        in_verifier: Collection[str] = (),
    ) -> None:
        """`drafters`: methods, each with its model or heads; empty for a lookup. Those `in_verifier` draft in its
        process, as those do that can draft nowhere else."""
        options = options or FleetOptions()
        template, traces = options.chat_template, options.traces
        names = options.served_model_name
        self._names = {} if names is None else {"GATEWAY_MODEL_ALIASES": ",".join(names)}
        self._chat = {"GATEWAY_CHAT_TEMPLATE": named_template(target, template)} if template else {}
        self._tracing = {} if traces is None else {"SLIPSTREAM_TRACE_FOLDER": str(traces.resolve())}
        self._all = {"METRICS_LISTEN": "127.0.0.1:0"} if options.metrics else {}
        both = self._all | {"DTYPE": dtype, "LISTEN": "127.0.0.1:0"}
        verifier = both | {"MODEL": target, "THREADS": str(threads), "QUANTISATION": options.target_quantisation}
        self._target = target
        self._loads = {VERIFIER: target} | dict(drafters)
        """Model of each role; empty for a lookup."""
        self._local = [kind for kind in drafters if kind in in_verifier or METHODS[kind].in_verifier_only]
        if self._local:
            local = {kind: drafters[kind] for kind in self._local}
            verifier |= _local_settings(local, dtype, options)
        python = sys.executable
        if options.engine != EMBEDDED:
            verifier |= {"ENGINE": options.engine}
            python = vllm_python()
        self.verifier = Role("verifier_svc", _prefixed("VERIFIER_", verifier) | self._tracing, python)
        drafter = both | {"QUANTISATION": options.draft_quantisation}
        methods = {
            kind: drafter | {"METHOD": kind, "MODEL": model}
            for kind, model in drafters.items()
            if kind not in self._local
        }
        for kind, settings in methods.items():
            settings |= {name: os.environ.get(f"DRAFTER_{name}", value) for name, value in OWN_CORPUS.items()}
            if options.translate and METHODS[kind].needs_model:
                settings["TRANSLATE_FOR"] = target
        pythons = dict.fromkeys(methods, sys.executable)
        for kind in options.methods_on_vllm(methods):
            methods[kind]["ENGINE"] = options.draft_engine
            pythons[kind] = vllm_python()
        self.drafters = {
            kind: Role("drafter_svc", _prefixed("DRAFTER_", settings) | self._tracing, pythons[kind])
            for kind, settings in methods.items()
        }
        self._addresses: dict[str, str] = {}
        """By drafter, and the verifier's."""
        self.gateway: Role | None = None

    async def start(self, listen: str, store: str, http: str = "off") -> str:
        # The gateway starts last: its settings are checked before models load.
        listens = {"GATEWAY_LISTEN": listen, "GATEWAY_HTTP": http}
        check = self._gateway(listens, store, SOMEWHERE, dict.fromkeys(self.drafters, SOMEWHERE)).check()
        with Loading() as loading:
            starting = [loading.watch(self._loading(VERIFIER), self.verifier.start())]
            for kind, role in self.drafters.items():
                starting.append(loading.watch(f"drafter {self._loading(kind)}", role.start()))
            _, *workers = await asyncio.gather(check, *starting)
            verifier, *drafters = [str(address) for address in workers]
            named = dict(zip(self.drafters, drafters, strict=True))
            self._addresses = named | {"verifier": verifier}
            await check_fit(verifier, drafters)
            self.gateway = self._gateway(listens, store, verifier, named)
            return await loading.watch("gateway waits for its session store and the verifier", self.gateway.start())

    def _loading(self, role: str) -> str:
        what = self._loads[role]
        return f"{role} loads {what}" if what else f"{role} starts"

    def _gateway(self, listens: Mapping[str, str], store: str, verifier: str, drafters: Mapping[str, str]) -> Role:
        own = [SPECULATOR] if os.environ.get("VERIFIER_VLLM_SPECULATOR") else []  # which the verifier reads itself
        named = {kind: IN_VERIFIER + kind for kind in (*self._local, *own)} | dict(drafters)
        settings = {
            **listens,
            "GATEWAY_VERIFIERS": verifier,
            "GATEWAY_DRAFTERS": ",".join(f"{kind}={address}" for kind, address in named.items()),
            "GATEWAY_TRUSTED_DRAFTERS": ",".join(named),  # our own processes
            "GATEWAY_TOKENIZER": self._target,
            "GATEWAY_STORE": store,
            "GATEWAY_ALONE": os.environ.get("GATEWAY_ALONE", "true"),
            "GATEWAY_REHOMING_WAIT_S": os.environ.get("GATEWAY_REHOMING_WAIT_S", str(VERIFIER_WAIT_S)),
        }
        return Role("gateway", settings | _prefixed("GATEWAY_", self._all) | self._tracing | self._chat | self._names)

    async def tend_drafter(self, kind: str) -> None:
        """A drafter is disposable: one that ends is started again at its address; sessions go on without it."""
        while True:
            await self._ended(self.drafters[kind], f"drafter {kind}")
            await asyncio.sleep(RESTART_S)
            with contextlib.suppress(Unavailable):  # it logged why; try again
                await self._start_again(self.drafters[kind], "DRAFTER_", kind)

    async def tend_verifier(self) -> None:
        """One that ends is started again at its address, and sessions go on with the same text. Raises Unavailable when
        it does not start."""
        while True:
            await self._ended(self.verifier, "the verifier")
            await self._start_again(self.verifier, "VERIFIER_", "verifier")

    async def _ended(self, role: Role, name: str) -> None:
        status = await role.ended()
        typer.echo(f"slipstream serve: {name} ended with status {status}; starting it again.", err=True)

    async def _start_again(self, role: Role, prefix: str, name: str) -> None:
        await role.start(_prefixed(prefix, {"LISTEN": self._addresses[name], "METRICS_LISTEN": role.metrics}))

    @property
    def roles(self) -> dict[str, Role]:
        """Roles in the order in which they are ended: none is left with a peer that is gone."""
        gateway = {} if self.gateway is None else {"gateway": self.gateway}
        return {**gateway, "verifier": self.verifier, **self.drafters}

    @property
    def http(self) -> str:
        """HOST:PORT of the HTTP API; empty for none."""
        return "" if self.gateway is None else self.gateway.http

    def announcement(self, grpc: str, as_json: bool) -> str:
        """The line with the addresses: the HTTP API is `off` (null) without one, metrics are of each role that
        serves them."""
        metrics = {name: role.metrics for name, role in self.roles.items() if role.metrics}
        if as_json:
            return json.dumps({"grpc": grpc, "http": self.http or None, "metrics": metrics})
        listed = ",".join(f"{name}={address}" for name, address in metrics.items())
        return f"{READY}{grpc} http={self.http or 'off'}" + (f" metrics={listed}" if listed else "")

    async def stop(self) -> None:
        for role in self.roles.values():
            await role.end()


def vllm_python() -> str:
    """The interpreter with vLLM: SLIPSTREAM_VLLM_PYTHON, else the one that `make setup-vllm` made, else this one.
    Raises FailedPrecondition where none of them has it."""
    if named := os.environ.get("SLIPSTREAM_VLLM_PYTHON"):
        if Path(named).exists():
            return named
        raise FailedPrecondition(f"SLIPSTREAM_VLLM_PYTHON={named} is no file; name an interpreter that has vLLM.")
    beside = (Path(sys.prefix).parent / VLLM_PYTHON, Path(__file__).parents[2] / VLLM_PYTHON, Path.cwd() / VLLM_PYTHON)
    if found := next((path for path in beside if path.exists()), None):
        return str(found)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise FailedPrecondition(
        "no interpreter with vLLM was found; run `make setup-vllm`, or set SLIPSTREAM_VLLM_PYTHON.",
        reason="VLLM_MISSING",
    )


def _local_settings(drafters: Mapping[str, str], dtype: str, options: FleetOptions) -> dict[str, str]:
    """Settings of a verifier in whose process these methods draft."""
    named = (f"{kind}={model}" if model else kind for kind, model in drafters.items())
    return {
        "LOCAL_DRAFTERS": ",".join(named),
        "DRAFT_DTYPE": dtype,
        "DRAFT_QUANTISATION": options.draft_quantisation,
        "DRAFT_TRANSLATE": str(options.translate).lower(),
    } | {name: os.environ.get(f"VERIFIER_{name}", value) for name, value in OWN_CORPUS.items()}


def _prefixed(prefix: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {prefix + name: value for name, value in settings.items()}
