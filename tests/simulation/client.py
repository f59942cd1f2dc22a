"""A client: asks for texts, one after the other, leaves some, edits some, cancels some."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from slipstream.client.client import RetrySettings, complete
from slipstream.errors import (
    DEVICE_MEMORY,
    SESSION_FAULT,
    Aborted,
    DeadlineExceeded,
    Internal,
    NotFound,
    OutOfRange,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.channel import error_of
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2
from tests.simulation.chained import VOCABULARY, continued
from tests.simulation.clock import Party
from tests.simulation.dialling import Channel
from tests.simulation.parties import arithmetic_numbered
from tests.simulation.text import Output, Text, words
from tests.simulation.watching import Violation, Watched, demand
from tests.support.resumed_completion import resume

if TYPE_CHECKING:
    from tests.simulation.world import World

ERRANDS = {"listen": 0.46, "leave": 0.12, "edit": 0.23, "cancel": 0.15, "poison": 0.04}
INTERVALS = (0, 0, 4, 1000)
"""Stream intervals of the texts."""
PATIENCE = RetrySettings(resume_s=60.0, stall_s=2.0)
ANSWER_S = 2.0
"""For one gateway to answer."""
TRIES = 40
PAUSE_S = 0.2
MOST_COMMITTED = 9
"""Tokens of a step."""
MOST_EDITED = 3
"""Tokens of an edit."""
CANCELLED, ERROR = verifier_pb2.FINISH_REASON_CANCELLED, verifier_pb2.FINISH_REASON_ERROR

Ask = Callable[[Any], Awaitable[Any]]


class Client:
    """All its chances are drawn from one seed of its own."""

    def __init__(self, world: World, number: int) -> None:
        self.party = Party(f"client {number}")
        self._world = world
        self._number = number
        self._chance = random.Random(world.chance.getrandbits(64))

    def talk(self) -> asyncio.Task[None]:
        return self.party.spawn(self._talk())

    async def _talk(self) -> None:
        size, counts = self._world.size, self._world.network.counts
        for turn in range(size.texts):
            await asyncio.sleep(self._chance.uniform(0.0, size.pause_s))
            first, tokens = (
                1 + self._number + turn * size.clients,
                self._chance.randint(size.least_tokens, size.most_tokens),
            )
            text = self._world.texts[first] = Text(first, tokens, size.arithmetics)
            (errand,) = self._chance.choices([*size.errands], [*size.errands.values()])
            text.mixed = size.arithmetics > 1 and errand == "listen" and self._chance.random() < size.mixed
            try:
                await getattr(self, f"_{errand}")(text)
            except SlipstreamError as error:
                if self._began_anew(error):
                    continue
                refusal = f"got {error.reason}: {error.message}"
                self._world.fail(Violation(f"the client of text {text.first}, which was to {errand}, {refusal}"))
            except Violation as violation:
                self._world.fail(violation)
            counts["texts"] += 1
            counts[f"texts to {errand}"] += 1

    # What it does with a text.

    async def _listen(self, text: Text) -> None:
        completion = await self._generate(text, self._gateway())
        _check_whole(completion, text)

    async def _poison(self, text: Text) -> None:
        """From some token on, every pass with this text fails."""
        # A pass that begins before that token may commit as many more as a step takes.
        self._world.poisons[text.first] = len(text.prompt) + self._chance.randrange(text.tokens - MOST_COMMITTED)
        try:
            completion = await self._generate(text, self._gateway())
        except Internal as error:
            demand(error.reason == SESSION_FAULT, f"poisoned text {text.first} got {error.reason}: {error.message}")
            self._world.network.counts["texts poisoned"] += 1
        except ResourceExhausted as error:
            demand(error.reason == DEVICE_MEMORY, f"poisoned text {text.first} got {error.reason}: {error.message}")
        else:  # told from the record
            demand(completion.finished.reason == ERROR, f"poisoned text {text.first} came to its end")

    async def _leave(self, text: Text) -> None:
        try:
            async with asyncio.timeout(self._chance.uniform(0.05, 3.0)):
                await self._listen(text)
        except TimeoutError:
            self._world.network.counts["clients left"] += 1

    async def _cancel(self, text: Text) -> None:
        losses, at = self._world.store.losses, self._gateway()
        saying = await self._begun(text, at)
        name = text.completion.started.session_id if text.completion else ""
        request = gateway_pb2.CancelRequest(session_id=name)
        leaves = self._chance.random() < 0.3
        asking = asyncio.create_task(self._asked(text, lambda stub: stub.Cancel(request, timeout=ANSWER_S), at, losses))
        if leaves:
            await asyncio.sleep(self._chance.uniform(0.0, 0.02))
            saying.cancel()
        if await asking is not None and losses == self._world.store.losses:
            self._world.network.counts["sessions cancelled"] += 1
            demand(bool(self._world.store.memory.entries[name].outcome), f"session {name} has not ended: cancelled")
        if leaves:
            await asyncio.wait([saying])
            return
        try:
            completion = await saying
        except OutOfRange as error:  # the log ends before the offset that it has received
            lost = losses != self._world.store.losses or self._world.relaxed
            demand(lost, f"text {text.first} was cancelled: {error.message}")
        else:
            if completion.finished.reason != CANCELLED:
                _check_whole(completion, text)

    async def _edit(self, text: Text) -> None:
        """Rolls the session back, with other tokens or another seed, or makes a branch of it."""
        losses, at = self._world.store.losses, self._gateway()
        saying = await self._begun(text, at)
        name = text.completion.started.session_id if text.completion else ""
        kept = self._chance.randint(0, len(text.tokens_received))
        room = min(MOST_EDITED, text.tokens - kept)
        edit = [self._chance.randrange(VOCABULARY) for _ in range(self._chance.randint(0, room))]
        branch = self._chance.random() < 0.3
        versions = text.edited(kept, edit, text.tokens_received)
        if not branch:
            self._world.store.may_cut.add(name)
        request = gateway_pb2.RollbackRequest(
            session_id=name,
            output_tokens=kept,
            token_ids=gateway_pb2.TokenIds(token_ids=edit),
            seed=self._chance.choice((None, self._chance.getrandbits(64))),
            branch=branch,
        )
        answer = await self._asked(text, lambda stub: stub.Rollback(request, timeout=ANSWER_S), at, losses)
        if answer is not None:
            self._world.network.counts["branches" if branch else "rollbacks"] += 1
            edited = text.prompt + versions[0][: kept + len(edit)]
            logged = self._world.store.logged(answer.key.id)
            right = losses != self._world.store.losses or logged[: len(edited)] == edited
            demand(right, f"session {answer.key.id} is not rolled back to {edited}: {logged}")
            await self._hear_edited(text, answer, versions, losses)
        try:
            completion = await saying
        except Aborted as error:
            if self._began_anew(error):
                return
            demand(error.reason == "ROLLED_BACK" and not branch, f"text {text.first} got {error.reason}")
        else:
            _check_whole(completion, text)

    async def _hear_edited(self, text: Text, answer: Any, versions: list[Output], losses: int) -> None:
        store, received = self._world.store, self._world.watched()
        name, kept = answer.key.id, answer.output_tokens
        received.edited, received.losses = versions, losses
        received.started = gateway_pb2.Started(session_id=name, prompt_token_ids=text.prompt)
        if self._chance.random() < 0.5:
            received.started.revision = answer.revision
        received.token_ids, received.text = list(versions[0][:kept]), words(versions[0][:kept], all_of_it=False)
        try:
            await resume(self._lines(self._gateway()), received, PATIENCE)
            _check_whole(received, text)
        except (NotFound, Aborted, OutOfRange) as error:  # out of range: the revision, which the store lost
            lost = f"the edited session {name} is lost: {error.reason}, {losses} losses, now {store.losses}"
            demand(losses != store.losses, lost)

    def _began_anew(self, error: SlipstreamError) -> bool:
        """Whether a session that the store lost began again with another arithmetic, which the client noticed."""
        lost = error.reason == "SESSION_LOST" and self._world.store.losses > 0
        return lost and self._world.size.arithmetics > 1

    # How it asks.

    def _gateway(self) -> int:
        return self._chance.randrange(len(self._world.gateways))

    def _present(self, at: int) -> Any:
        """The gateway that is now where a line leads to."""
        return self._world.alive.get(self._world.gateways[at % len(self._world.gateways)])

    def _lines(self, at: int) -> list[Any]:
        lines = [Channel(self._world.network, name) for name in self._world.gateways]
        return [*lines[at % len(lines) :], *lines[: at % len(lines)]]

    async def _begun(self, text: Text, at: int) -> asyncio.Task[Watched]:
        """A text of which some tokens came, or all."""
        saying = asyncio.create_task(self._generate(text, at))
        enough = self._chance.randint(1, text.tokens)
        while not saying.done() and len(text.tokens_received) < enough:
            await asyncio.sleep(0.02)
        return saying

    async def _generate(self, text: Text, at: int) -> Watched:
        request = gateway_pb2.GenerateRequest(max_tokens=text.tokens, stream_interval=INTERVALS[text.first % 4])
        request.sampling.temperature = 0.0
        if text.mixed:
            request.mixed_arithmetic = True
        request.prompt_token_ids.token_ids.extend(text.prompt)
        received: list[str] = []
        for shift in itertools.count(at):
            line, *others = self._lines(shift)
            text.asked = self._present(shift)
            try:
                completion = await complete(line, request, received.append, others, PATIENCE)
                assert isinstance(completion, Watched)
                return completion
            except (Unavailable, ResourceExhausted):  # it never began: another try is another text
                if received:
                    raise
                await asyncio.sleep(PAUSE_S)
        raise AssertionError

    async def _asked(self, text: Text, ask: Ask, at: int, losses: int) -> Any:
        """The answer of whichever gateway gives one; None where what is asked of is lost."""
        for shift in range(at, at + TRIES):
            line, gateway = self._lines(shift)[0], self._present(shift)
            try:
                return await ask(gateway_pb2_grpc.GatewayServiceStub(line))
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure)
            if isinstance(error, OutOfRange):
                # It may lack what another gateway had still to write.
                here = text.completion is not None and text.completion.starts == 1 and text.asked is gateway
                lost = losses != self._world.store.losses or (self._world.relaxed and not here)
                demand(lost, f"the text that the client of text {text.first} received is not there: {error.message}")
            elif isinstance(error, NotFound):
                demand(losses != self._world.store.losses, f"the session of text {text.first} is lost")
                return None
            elif not isinstance(error, (Unavailable, ResourceExhausted, DeadlineExceeded, Aborted)):
                raise error
            await asyncio.sleep(PAUSE_S)
        return None


def _check_whole(completion: Watched, text: Text) -> None:
    if text.mixed:
        _check_marks(completion, text)
        return
    whole = [version[: text.tokens] for version in completion.versions(text)]
    demand(tuple(completion.token_ids) in whole, f"text {text.first} ended as {completion.token_ids}, not {whole}")
    demand(completion.text in map(words, whole), f"text {text.first} ended as {completion.text!r}")
    spans = completion.finished.statistics.arithmetics
    demand(len(spans) < 2, f"text {text.first} is marked as a mixture: {spans}")


def _check_marks(completion: Watched, text: Text) -> None:
    """Each span of the text is what its target writes behind the tokens before it."""
    spans = completion.finished.statistics.arithmetics
    completion.world.network.counts["texts mixed" if len(spans) > 1 else "texts of one arithmetic"] += 1
    tokens, ends = text.prompt, [*(each.offset for each in spans[1:]), text.tokens]
    for span, end in zip(spans, ends, strict=True):
        tokens = continued(tokens, len(text.prompt) + end, arithmetic_numbered(span.arithmetic))
    right = tuple(completion.token_ids) == tokens[len(text.prompt) :]
    demand(right, f"text {text.first} ended as {completion.token_ids}, which is not of {spans}")
