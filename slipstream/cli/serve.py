"""`slipstream serve`: every role on this machine, each as its own process (`slipstream.serving`)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import explained, need_installed
from slipstream.engine.cpu_cores import available_cores
from slipstream.errors import InvalidArgument, Unavailable
from slipstream.proposers.registry import METHODS
from slipstream.serving.default_drafters import default_drafters
from slipstream.serving.fleet import Fleet
from slipstream.serving.options import DRAFTING, EMBEDDED, AddressOptions, FleetOptions, ModelOptions
from slipstream.serving.placement import Placement, computes_on_own_cores, place
from slipstream.tokenizer.gguf_folder import is_gguf
from slipstream.tokenizer.pairing import check_vocabularies, padding_note
from slipstream.tokenizer.vocabulary import check_folder, model_folder, shipped_model


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


def _placed(methods: Sequence[str], draft_in_verifier: bool | None, threads: int, fleet: FleetOptions) -> Placement:
    """Reports its choice."""
    cores = available_cores()
    own_cores, on_vllm = computes_on_own_cores(fleet.engine), fleet.methods_on_vllm(methods)
    placement = place(cores, methods, draft_in_verifier, threads, own_cores, on_vllm)
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
    for engine in (fleet.engine, fleet.draft_engine):
        if engine not in (EMBEDDED, "vllm"):
            raise typer.BadParameter(f"no such engine: {engine}; choose {EMBEDDED} or vllm.")
    with explained("serve"):
        placed = _placed(list(drafters), draft_in_verifier, models.threads, fleet)
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
    """Names the drafters where the user names none: a draft model that translates fits every target."""
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
