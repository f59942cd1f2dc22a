"""Lines that a command prints while it waits for text, and once the waiting is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import typer

from slipstream.client.completion import Completion
from slipstream.errors import SlipstreamError
from slipstream.v1 import gateway_pb2

SILENCE_S = 2.0
"""Seconds without a piece of the text after which the command looks for the cause, and looks again."""
FEW = 0.5
"""Share of rounds with candidates below which a pause of drafting is named."""
PAUSES = {
    "price": "a candidate costs what it brings",
    "slower": "no text of now gains as much as drafting slows its steps",
    "trial": "a trial without drafting is under way",
}
"""Sentences for the causes of `slipstream_drafting_paused`."""
Listing = Callable[[], gateway_pb2.ListModelsResponse]


class SilenceWatch:
    """Prints once for each silence what the text waits for, as soon as the gateway knows; nothing for a slow model."""

    def __init__(self, list_models: Listing, model: str, silence_s: float = SILENCE_S) -> None:
        """`model`: that was asked for; empty for the only one."""
        self._list_models, self._model, self._silence_s = list_models, model, silence_s
        self._moved = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="silence", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._moved.set()

    def piece_came(self) -> None:
        self._moved.set()

    def _watch(self) -> None:
        while not self._over:
            if self._moved.wait(self._silence_s):
                self._moved.clear()
                continue
            cause = cause_of_silence(self._list_models, self._model)
            if cause and not self._moved.is_set():
                typer.echo(f"slipstream: waiting for {cause}", err=True)
                self._moved.wait()


def cause_of_silence(list_models: Listing, model: str) -> str:
    """Names the missing part that a text of this model waits for, as far as the gateway knows; empty where all
    answer."""
    try:
        listed = list_models()
    except SlipstreamError as error:
        what = "a verifier" if error.reason == "NO_VERIFIER" else "a gateway"
        return f"{what}: {error.message}"
    served = [each for each in listed.models if model in ("", each.model.name)]
    if served and not any(each.verifiers for each in served):
        away = sum(each.verifiers_away for each in served)
        return f"a verifier: none of {away} answers" if away > 1 else "a verifier: the only one does not answer"
    if listed.store.kind and not listed.store.answers:
        return f"the session store ({listed.store.kind}), which does not answer"
    return ""


def summary(completion: Completion, list_models: Listing) -> str:
    """Tokens of a pass, acceptance, speed, and why there were few candidates where drafting pauses."""
    seen = completion.finished.statistics
    parts = [f"{seen.emitted} tokens in {seen.rounds} passes"]
    if seen.rounds:
        parts[0] += f", {seen.emitted / seen.rounds:.1f} a pass"
    if seen.drafted:
        parts.append(f"{seen.accepted / seen.drafted:.0%} of {seen.drafted} candidates accepted")
    if (tpot_s := completion.tpot_s) is not None:
        parts.append(f"{1e3 * tpot_s:.1f} ms a token")
    if seen.rounds_with_drafts < FEW * seen.rounds and (why := _few_candidates(completion.started.model, list_models)):
        parts.append(why)
    return "; ".join(parts)


def pause_causes(served: gateway_pb2.ServedModel) -> str:
    return "; ".join(PAUSES.get(cause, cause) for cause in served.pause_causes)


def _few_candidates(model: str, list_models: Listing) -> str:
    try:
        served = next((each for each in list_models().models if each.model.name == model), None)
    except SlipstreamError:
        return ""
    if served is None:
        return ""
    if served.paused_verifiers:
        return f"drafting pauses here, because {pause_causes(served)}"
    if not any(not each.away and not each.mismatch for each in served.drafters):
        return "no drafter drafts for it (`slipstream status`)"
    return ""
