"""`slipstream serve`: every role on this machine, each as its own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from slipstream.cli.default_drafters import default_drafters
from slipstream.cli.loading import Loading
from slipstream.cli.options import explained, need_installed
from slipstream.engine.cpu_cores import available_cores
from slipstream.errors import FailedPrecondition, InvalidArgument, Unavailable
from slipstream.process import ALLOCATOR, END_WITH_PARENT, FAILED, PATIENT_THREADS
from slipstream.proposers.registry import IN_VERIFIER, METHODS
from slipstream.rpc import DRAFTER, VERIFIER
from slipstream.rpc.channel import dialer, parsed
from slipstream.rpc.tls import certificates_from_env
from slipstream.tokenizer.chat_template_source import SHIPPED, named_template
from slipstream.tokenizer.gguf_folder import is_gguf
from slipstream.tokenizer.pairing import check_vocabularies, padding_note
from slipstream.tokenizer.vocabulary import (
    check_folder,
    model_folder,
    share_vocabulary,
    shipped_model,
    template_warning,
)
from slipstream.v1 import worker_pb2, worker_pb2_grpc

READY = "ready grpc="
OWN_CORPUS = {"CORPUS_TOKENS": "100000"}
"""Requests with one cache salt help each other; others share nothing, for several people may use this machine."""
END_GRACE_S = 25.0
"""Longer than the gateway's own grace for its sessions, so that it can report to clients and traces before it is
killed."""
RESTART_S = 1.0
MODELS, DRAFTING, ADDRESSES, OBSERVATION = "Target", "Drafting", "Addresses and store", "Observation"
"""Groups of options in `--help`."""
VERIFIER_WAIT_S = 120.0
"""Seconds that sessions wait for a verifier that is started again: it loads its model."""
EMBEDDED = "embedded"
OPTIONS = {
    "VERIFIER_MODEL": "--target",
    "GATEWAY_TOKENIZER": "--target",
    "DRAFTER_MODEL": "--draft",
    "VERIFIER_LOCAL_DRAFTERS": "--drafter",
    "DRAFTER_METHOD": "--drafter",
    "VERIFIER_DTYPE": "--dtype",
    "DRAFTER_DTYPE": "--dtype",
    "VERIFIER_DRAFT_DTYPE": "--dtype",
    "VERIFIER_THREADS": "--threads",
    "VERIFIER_QUANTISATION": "--target-quantisation",
    "DRAFTER_QUANTISATION": "--draft-quantisation",
    "VERIFIER_DRAFT_QUANTISATION": "--draft-quantisation",
    "DRAFTER_TRANSLATE_FOR": "--translate",
    "VERIFIER_DRAFT_TRANSLATE": "--translate",
    "VERIFIER_ENGINE": "--engine",
    "GATEWAY_CHAT_TEMPLATE": "--chat-template",
    "GATEWAY_LISTEN": "--listen",
    "GATEWAY_HTTP": "--http",
    "GATEWAY_STORE": "--store",
}
"""Options that set these settings of the roles: errors name them."""
SETTING = re.compile(r"\b((?:GATEWAY|VERIFIER|DRAFTER)_[A-Z_]+)\b(=)?")
VLLM_PYTHON = Path(".venv-vllm/bin/python")
"""Where `make setup-vllm` puts it."""
FEW_CORES = 2
SOMEWHERE = "127.0.0.1:1"
"""Address in place of workers that have none yet."""


class Role:
    """One process: started, waited for until it can serve, ended."""

    def __init__(self, module: str, settings: Mapping[str, str], python: str = sys.executable) -> None:
        self.module = module
        self._python = python
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self.metrics = self.http = ""
        """HOST:PORT of its metrics, and of its HTTP API; empty for none."""

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process of a role that was started."""
        assert self._process is not None
        return self._process

    async def check(self) -> None:
        """Raises Unavailable for settings with which it would not start; its log is on stderr."""
        process = await self._run({}, "--check")
        output, _ = await process.communicate()
        if process.returncode:
            cause = next(filter(None, map(cause_of, output.decode().splitlines())), "")
            raise Unavailable(cause or f"{self.module} cannot start as it is set up.")

    async def start(self, more: Mapping[str, str] | None = None) -> str:
        """Returns the address it serves at. Raises Unavailable, with its cause, where it ends before it is ready; its
        log is on stderr."""
        self._process = process = await self._run(more or {})
        assert process.stdout is not None
        cause = ""
        async for line in process.stdout:
            text = line.decode()
            cause = cause_of(text) or cause
            if text.startswith(READY):
                ready = dict(word.partition("=")[::2] for word in text.split()[1:])
                self.metrics, self.http = ready.get("metrics", ""), ready.get("http", "")
                return ready["grpc"]
        status = await process.wait()
        raise Unavailable(cause or f"{self.module} ended with status {status} before it was ready; see above.")

    async def _run(self, more: Mapping[str, str], *options: str) -> asyncio.subprocess.Process:
        environment = (
            ALLOCATOR | PATIENT_THREADS | dict(os.environ) | dict(self._settings) | {END_WITH_PARENT: "1"} | dict(more)
        )
        command = [self._python, "-m", self.module, *options]
        return await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None and self._process.stdout is not None
        await self._process.stdout.read()
        return await self._process.wait()

    async def end(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_GRACE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def cause_of(line: str) -> str:
    """The error that a role names in this line of its output, with settings in the words of this command; empty for
    other lines."""
    if not line.startswith(FAILED):
        return ""

    def word(found: re.Match[str]) -> str:
        option = OPTIONS.get(found[1])
        return found[0] if option is None else option + (" " if found[2] else "")

    return SETTING.sub(word, line.strip().removeprefix(FAILED))


@dataclass(frozen=True)
class ModelOptions:
    """Options of `serve` for its models and methods."""

    target: Annotated[
        str,
        typer.Option(
            help="Target model: a folder, a GGUF file or a hub id[@REVISION]. Default: the shipped one.",
            rich_help_panel=MODELS,
        ),
    ] = ""
    draft: Annotated[
        str,
        typer.Option(
            help="Draft model: a folder, a GGUF file or a hub id[@REVISION]. Default: the shipped one.",
            rich_help_panel=DRAFTING,
        ),
    ] = ""
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; repeat it for more. METHOD=FOLDER names its model or heads. `none`: plain "
            "decoding. Default: model, where a draft model fits the target, and suffix in the verifier.",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (the checkpoint's own, or float32 where this CPU would emulate it), float32, bfloat16, float16.",
            rich_help_panel=MODELS,
        ),
    ] = "auto"
    threads: Annotated[
        int,
        typer.Option(
            help="Threads of the verifier's model; 0: all cores, less one for drafter processes.",
            rich_help_panel=MODELS,
        ),
    ] = 0


@dataclass(frozen=True)
class FleetOptions:
    """Options of `serve` for its processes."""

    target_quantisation: Annotated[
        str, typer.Option(help="int8 or int4; changes the text.", rich_help_panel=MODELS)
    ] = ""
    draft_quantisation: Annotated[
        str, typer.Option(help="int8, int4 or int8-dynamic; never changes the text.", rich_help_panel=DRAFTING)
    ] = ""
    engine: Annotated[
        str, typer.Option(help="What runs the target: embedded or vllm (`make setup-vllm`).", rich_help_panel=MODELS)
    ] = EMBEDDED
    translate: Annotated[
        bool,
        typer.Option(
            "--translate",
            help="The draft model may have another tokenizer; translate its tokens.",
            rich_help_panel=DRAFTING,
        ),
    ] = False
    chat_template: Annotated[
        str,
        typer.Option(
            help=f"Chat template: a file (Jinja), or one of {', '.join(SHIPPED)}; default: the target's.",
            rich_help_panel=MODELS,
        ),
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name by which requests may ask for the target; repeat it for more.", rich_help_panel=MODELS
        ),
    ] = None
    traces: Annotated[
        Path | None,
        typer.Option(help="Write traces to this folder, for `slipstream trace`.", rich_help_panel=OBSERVATION),
    ] = None
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics",
            help="Serve /metrics of every role, at the addresses in the ready line.",
            rich_help_panel=OBSERVATION,
        ),
    ] = False


@dataclass(frozen=True)
class AddressOptions:
    """Options of `serve` that say where it is reached and where it logs sessions."""

    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the gateway; port 0 picks a free one.", rich_help_panel=ADDRESSES)
    ] = "127.0.0.1:50051"
    http: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the HTTP API, OpenAI-compatible; port 0 picks a free one; `off`: none.",
            rich_help_panel=ADDRESSES,
        ),
    ] = "127.0.0.1:8000"
    store: Annotated[
        str, typer.Option(help="Session log: memory, or redis://HOST:PORT/DB.", rich_help_panel=ADDRESSES)
    ] = "memory"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the addresses as one JSON object.", rich_help_panel=ADDRESSES)
    ] = False


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
        self.drafters = {
            kind: Role("drafter_svc", _prefixed("DRAFTER_", settings) | self._tracing)
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
        named = {kind: IN_VERIFIER + kind for kind in self._local} | dict(drafters)
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
        """The line that says where to connect: the HTTP API is `off` (null) without one, metrics are of each role that
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


async def check_fit(verifier: str, drafters: Sequence[str]) -> None:
    """Raises FailedPrecondition for a draft model with another vocabulary: it would never be used. Prints a warning for
    one with another chat template, and for each model that does without its fast forward pass."""
    certificates, models = certificates_from_env(), []
    for role, address in ((VERIFIER, verifier), *((DRAFTER, drafter) for drafter in drafters)):
        async with dialer(role, certificates)(address) as line:
            stub = worker_pb2_grpc.WorkerServiceStub(line)
            models.append(parsed(await stub.GetModel(worker_pb2.GetModelRequest())).model)
    for model in models:
        if model.forward_notice:
            typer.echo(f"slipstream serve: WARNING: {model.name}: {model.forward_notice}", err=True)
    target = models[0]
    for model in models[1:]:
        if not share_vocabulary(model, target):
            raise FailedPrecondition(
                f"draft model {model.name} has vocabulary {model.vocabulary_fingerprint}, target {target.name} has "
                f"{target.vocabulary_fingerprint}; choose a pair with one tokenizer, or let the drafter translate "
                "(`slipstream serve --translate`).",
                reason="VOCABULARY_MISMATCH",
            )
        if warning := template_warning(model, target):
            typer.echo(f"slipstream serve: {warning}", err=True)


async def run(fleet: Fleet, addresses: AddressOptions) -> None:
    """Serve until SIGTERM or SIGINT, or until the gateway ends or the verifier cannot be started again, which is an
    error."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        stop = asyncio.create_task(stopping.wait())
        starting = asyncio.create_task(fleet.start(addresses.listen, addresses.store, addresses.http))
        await asyncio.wait([stop, starting], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        print(fleet.announcement(starting.result(), addresses.as_json), flush=True)
        assert fleet.gateway is not None
        drafters = [asyncio.create_task(fleet.tend_drafter(kind)) for kind in fleet.drafters]
        verifier, gateway = asyncio.create_task(fleet.tend_verifier()), asyncio.create_task(fleet.gateway.ended())
        done, pending = await asyncio.wait([stop, verifier, gateway], return_when=asyncio.FIRST_COMPLETED)
        for task in [*pending, *drafters]:
            task.cancel()
        await asyncio.gather(*pending, *drafters, return_exceptions=True)  # none starts a process any more
        if verifier in done:
            verifier.result()
        if gateway in done:
            raise Unavailable(f"the gateway ended with status {gateway.result()}; serving is over.")
    finally:
        await fleet.stop()


class Placement(NamedTuple):
    """How the roles share one machine."""

    in_verifier: tuple[str, ...]
    """Methods that draft in the verifier's process."""
    threads: int
    """Threads of the verifier's model."""


def place(
    cores: int, methods: Sequence[str], draft_in_verifier: bool | None, threads: int, own_cores: bool
) -> Placement:
    """What the user asked for; where that is None or 0, what was measured to be best. `own_cores`: the target computes
    on these cores, not on a GPU nor in vLLM's workers.

    A lookup takes microseconds, less than a message to another process. On few cores a draft model's process takes the
    time of the verifier's threads, and its round trips wait for them. Elsewhere a core is left to it: more busy threads
    than cores slow every step down."""
    inside = draft_in_verifier
    if inside is None:
        inside = own_cores and cores <= FEW_CORES
    lookups = draft_in_verifier is not False
    placed = tuple(
        kind
        for kind in methods
        if inside or METHODS[kind].in_verifier_only or (lookups and not METHODS[kind].needs_model)
    )
    apart = len(placed) < len(methods)
    return Placement(placed, threads or max(1, cores - apart))


def computes_on_own_cores(engine: str) -> bool:
    """True unless a GPU or vLLM's workers compute the target."""
    return engine == EMBEDDED and not any(Path("/dev").glob("nvidia[0-9]*"))


def _placed(methods: Sequence[str], draft_in_verifier: bool | None, threads: int, engine: str) -> Placement:
    """Says what it chose."""
    cores = available_cores()
    placement = place(cores, methods, draft_in_verifier, threads, computes_on_own_cores(engine))
    if draft_in_verifier is None or not threads:
        apart = [kind for kind in methods if kind not in placement.in_verifier]
        inside = f"drafters in the verifier {', '.join(placement.in_verifier) or 'none'}"
        drafting = f"{inside}, in processes of their own {', '.join(apart) or 'none'} (--[no-]draft-in-verifier)"
        said = f"slipstream serve: cores {cores}, threads of the target {placement.threads} (--threads), "
        typer.echo(said + (drafting if methods else "no drafters"), err=True)
    return placement


def serve(
    *,
    models: ModelOptions,
    addresses: AddressOptions,
    fleet: FleetOptions,
    draft_in_verifier: Annotated[
        bool | None,
        typer.Option(
            help="Run drafters inside the verifier's process, which spares processes, memory and the network hop. "
            "Default: lookups; draft models on up to 2 cores without a GPU.",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
) -> None:
    """Run verifier, drafter and gateway on this machine and print `ready grpc=HOST:PORT http=HOST:PORT` when they can
    serve."""
    named = _named(models.drafter or _default(models, fleet.translate, draft_in_verifier))
    with explained("serve"):
        need_installed("torch", "transformers", "tokenizers", "structlog", "redis")
        drafters = {kind: _model_of(kind, own, models.target, models.draft) for kind, own in named.items()}
        target = models.target or shipped_model("target")
        target = served_folder(target)
        drafters = {kind: _checked(kind, model, target, fleet.translate) for kind, model in drafters.items()}
    if fleet.engine not in (EMBEDDED, "vllm"):
        raise typer.BadParameter(f"no such engine: {fleet.engine}; choose {EMBEDDED} or vllm.")
    with explained("serve"):
        placed = _placed(list(drafters), draft_in_verifier, models.threads, fleet.engine)
        served = Fleet(target, drafters, models.dtype, placed.threads, fleet, in_verifier=placed.in_verifier)
        asyncio.run(run(served, addresses))


def _checked(kind: str, model: str, target: str, translate: bool) -> str:
    """The folder of a method's model or heads. Raises NotFound for a missing one, FailedPrecondition for a draft model
    with another vocabulary, before any role reads weights."""
    if METHODS[kind].needs_hidden_states:
        if not Path(model).is_file():
            model_folder(model)  # which may have no config.json
        return model
    folder = served_folder(model) if model else model
    if METHODS[kind].compares_tokenizers and not translate:
        check_vocabularies(folder, target)
        if note := padding_note(folder, target):
            typer.echo(f"slipstream serve: {note}.", err=True)
    return folder


def served_folder(name: str) -> str:
    """The name that every role is given: of a GGUF file its folder, so that none of them reads the file. Raises what
    `check_folder` raises."""
    check_folder(name)
    return str(model_folder(name)) if is_gguf(name) else name


def _default(models: ModelOptions, translates: bool, in_verifier: bool | None) -> tuple[str, ...]:
    """What drafts where no drafter is named: a draft model that translates fits every target."""
    return default_drafters("" if translates else models.target, models.draft, in_verifier)


def _named(given: Sequence[str]) -> dict[str, str]:
    """Methods with the folders that METHOD=FOLDER gives them; empty for none. Raises BadParameter for others."""
    named = {kind: folder for kind, _, folder in (each.partition("=") for each in given)}
    if unknown := set(named) - {*METHODS, "none"}:
        raise typer.BadParameter(f"no such drafter: {', '.join(unknown)}; choose {', '.join(METHODS)} or none.")
    if "none" in named and len(named) > 1:
        raise typer.BadParameter("`--drafter none` is plain decoding; give it alone.")
    if idle := [kind for kind, folder in named.items() if folder and not METHODS[kind].needs_model]:
        raise typer.BadParameter(f"the drafter {idle[0]} has no model; leave ={named[idle[0]]} out.")
    named.pop("none", None)
    return named


def _model_of(kind: str, own: str, target: str, draft: str) -> str:
    """Model or heads of a method: its own folder, else --draft, else the shipped ones, which are heads of the shipped
    target alone. Raises InvalidArgument or NotFound where there are none."""
    if own or not METHODS[kind].needs_model:
        return own
    if draft:
        return draft
    if METHODS[kind].needs_hidden_states and target and Path(target).resolve() != Path(shipped_model("target")):
        raise InvalidArgument(
            f"the heads of {kind} belong to one target; name those of {target}: --drafter {kind}=FOLDER."
        )
    return shipped_model("draft" if kind == "model" else kind)
