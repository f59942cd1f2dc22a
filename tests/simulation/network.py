"""The network: messages between parties arrive late, in order, once; or not so, as the weather has it.

A stream is a pair of pipes. gRPC promises that a stream's frames arrive in order and once, or that it breaks; `Weather`
can break that promise too, as no network does but a broken or hostile proxy between two parties might.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tests.simulation.clock import Party, PartyLoop

if TYPE_CHECKING:
    from tests.simulation.serving import Host

DIALLER_S, LISTENER_S = 2.0, 4.0
"""A peer that does not answer for so long is taken for dead, by either end of a stream: keepalive."""
LOOK_S = 0.25
NEXT_S = 1e-6
"""Between two frames of one pipe."""


@dataclass
class Weather:
    """Faults of the whole network: seconds, and probabilities for each frame."""

    least_s: float = 0.0005
    most_s: float = 0.004
    late: float = 0.0
    """Share of frames that take `late_s` more, and those behind them with them."""
    late_s: float = 0.3
    dropped: float = 0.0
    repeated: float = 0.0
    overtaken: float = 0.0
    """Share of frames that later ones may overtake."""


@dataclass(frozen=True, slots=True)
class Parcel:
    kind: str
    """`open`, `headers`, `message`, `trailers` or `reset`."""
    data: bytes = b""
    name: str = ""
    """The method, of an open; the status code, of trailers."""
    details: str = ""
    metadata: tuple[tuple[str, bytes], ...] = ()


class End(Protocol):
    """One end of a stream."""

    party: Party

    def receive(self, parcel: Parcel) -> None: ...

    def broken(self, why: str) -> None:
        """The connection is gone."""


@dataclass(eq=False)
class Pipe:
    """One direction."""

    source: Party
    target: Party
    receive: Callable[[Parcel], None]
    latest: float = 0.0
    cut: bool = False


@dataclass(eq=False)
class Stream:
    number: int
    dialler: End
    there: Pipe
    back: Pipe
    listener: End | None = None
    cut_off: dict[str, float] = field(default_factory=dict)
    """Since when either end does not reach the other."""

    @property
    def parties(self) -> tuple[Party, Party]:
        return self.there.source, self.there.target


class Network:
    def __init__(self, loop: PartyLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.weather = Weather()
        self.hosts: dict[str, Host] = {}
        self.streams: dict[int, Stream] = {}
        self.blocked: dict[tuple[str, str], list[tuple[Pipe, Parcel]]] = {}
        """What waits on each way that is blocked now."""
        self.trace = hashlib.sha256()
        """Hash of all events with their times."""
        self.counts: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._nobody = contextvars.Context()

    def note(self, *words: object) -> None:
        """One more event of the trace."""
        self.trace.update(f"{self.loop.now!r} {words!r}\n".encode())

    def open(self, dialler: End, address: str) -> Stream | None:
        """A stream to the host that listens there; None where none does."""
        host = self.hosts.get(address)
        if host is None or host.party.dead:
            return None
        there = Pipe(dialler.party, host.party, lambda parcel: host.accept(stream, parcel))
        stream = Stream(next(self._numbers), dialler, there, Pipe(host.party, dialler.party, dialler.receive))
        self.streams[stream.number] = stream
        return stream

    def close(self, stream: Stream) -> None:
        """Nothing more comes on it."""
        self.streams.pop(stream.number, None)

    def send(self, pipe: Pipe, parcel: Parcel) -> None:
        if pipe.cut or pipe.source.dead:
            return
        now, weather = self.loop.time(), self.weather
        for _ in range(self._copies(parcel)):
            when = now + self.delay_s()
            if parcel.kind == "message" and self._happens(weather.overtaken, "frames overtaken"):
                when += self.chance.uniform(0.0, 0.05)
            else:
                when = pipe.latest = max(when, pipe.latest + NEXT_S)
            self.loop.call_at(when, self._arrive, pipe, parcel, context=self._nobody)

    def delay_s(self) -> float:
        weather = self.weather
        late = weather.late_s if self._happens(weather.late, "frames late") else 0.0
        return self.chance.uniform(weather.least_s, weather.most_s) + late

    def after(self, seconds: float, what: Callable[[], None], party: Party | None = None) -> None:
        """Calls `what` later, as that party or outside of every party."""
        self.loop.call_at(self.loop.time() + seconds, what, context=self._nobody if party is None else party.context)

    # Faults.

    def block(self, source: str, target: str) -> None:
        """Messages from one to the other wait until they are unblocked, for TCP sends it again and again."""
        self.note("block", source, target)
        self.blocked.setdefault((source, target), [])

    def unblock(self, source: str, target: str) -> None:
        self.note("unblock", source, target)
        for pipe, parcel in self.blocked.pop((source, target), []):
            self._arrive(pipe, parcel)

    def reset(self, one: str, other: str) -> None:
        """Every stream between the two breaks; what was under way is lost."""
        self.note("reset", one, other)
        for stream in list(self.streams.values()):
            names = {party.name for party in stream.parties}
            if names == {one, other}:
                self.break_off(stream)

    def sever(self, party: Party) -> None:
        """The party is dead: its machine closes the connections of peers that it reaches."""
        for stream in list(self.streams.values()):
            if party in stream.parties:
                self.break_off(stream)

    def break_off(self, stream: Stream) -> None:
        stream.there.cut = stream.back.cut = True
        self.close(stream)
        for end in (stream.dialler, stream.listener):
            if end is not None and not end.party.dead:
                self.after(self.delay_s(), lambda end=end: end.broken("the connection was reset."), end.party)

    async def keep_alive(self) -> None:
        """Until cancelled: each end of a stream finds out when it does not reach the other."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = self.loop.time()
            for stream in list(self.streams.values()):
                self._look(stream, stream.dialler, DIALLER_S, now)
                if stream.listener is not None:
                    self._look(stream, stream.listener, LISTENER_S, now)

    def _look(self, stream: Stream, end: End, patience_s: float, now: float) -> None:
        one, other = stream.parties
        peer = other if end.party is one else one
        away = peer.frozen or (one.name, other.name) in self.blocked or (other.name, one.name) in self.blocked
        if not away or end.party.frozen:
            stream.cut_off.pop(end.party.name, None)
        elif now - stream.cut_off.setdefault(end.party.name, now) >= patience_s:
            self.counts["peers given up"] += 1
            del stream.cut_off[end.party.name]
            self.after(0.0, lambda: end.broken("the peer does not answer."), end.party)

    def _copies(self, parcel: Parcel) -> int:
        if parcel.kind != "message":
            return 1
        if self._happens(self.weather.dropped, "frames dropped"):
            return 0
        return 2 if self._happens(self.weather.repeated, "frames repeated") else 1

    def _happens(self, share: float, name: str) -> bool:
        happens = share > 0.0 and self.chance.random() < share
        self.counts[name] += happens
        return happens

    def _arrive(self, pipe: Pipe, parcel: Parcel) -> None:
        way = pipe.source.name, pipe.target.name
        if pipe.cut or pipe.target.dead:
            return
        if way in self.blocked:
            self.blocked[way].append((pipe, parcel))
        else:
            self.loop.call_soon(self._deliver, pipe, parcel, context=pipe.target.context)

    def _deliver(self, pipe: Pipe, parcel: Parcel) -> None:
        if pipe.cut or pipe.target.dead:
            return
        self.note(pipe.source.name, pipe.target.name, parcel)
        self.counts["frames"] += 1
        self.loop.stir()
        pipe.receive(parcel)
