"""A load generator: many completions from one gateway, and their totals."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.client.gateway_endpoint import GatewayEndpoint
from slipstream.v1 import gateway_pb2


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Completions of one run, with totals. Times in seconds."""

    completions: list[Completion]
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    def total(self, name: str) -> float:
        """The sum of one of the statistics over all completions."""
        return sum(float(getattr(completion.finished.statistics, name)) for completion in self.completions)

    @property
    def hit_rate(self) -> float | None:
        """Share of rounds that wanted candidates and had some when the round before ended."""
        hits = self.total("hits")
        missed = sum(sum(completion.finished.statistics.misses.values()) for completion in self.completions)
        return hits / (hits + missed) if hits + missed else None

    def report(self) -> dict[str, float | None]:
        rounds, drafted, accepted = (self.total(name) for name in ("rounds", "drafted", "accepted"))
        with_drafts = self.total("rounds_with_drafts")
        ttft = [completion.finished.statistics.ttft_s for completion in self.completions]
        tpot = [tpot for completion in self.completions if (tpot := completion.tpot_s) is not None]
        return {
            "requests": len(self.completions),
            "tokens": self.tokens,
            "wall_s": self.wall_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_round": self.tokens / rounds if rounds else None,
            "drafted": drafted,
            "accepted": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_length": 1 + accepted / with_drafts if with_drafts else None,
            "hit_rate": self.hit_rate,
            "wait_s": self.total("wait_s"),
            "bubble_s": self.total("bubble_s"),
            "ttft_p50_s": statistics.median(ttft),
            "ttft_p99_s": _percentile(ttft, 0.99),
            "tpot_p50_s": statistics.median(tpot) if tpot else None,
            "tpot_p99_s": _percentile(tpot, 0.99) if tpot else None,
        }


async def run_load(
    server: str | GatewayEndpoint, requests: Sequence[gateway_pb2.GenerateRequest], concurrency: int
) -> LoadResult:
    """Runs all requests, at most `concurrency` at once. Raises the first error of a request."""
    gate = asyncio.Semaphore(concurrency)
    gateway = GatewayEndpoint(server) if isinstance(server, str) else server
    async with gateway.channel() as channel:

        async def one(request: gateway_pb2.GenerateRequest) -> Completion:
            async with gate:
                return await complete(channel, request)

        started = time.perf_counter()
        completions = await asyncio.gather(*(one(request) for request in requests))
        return LoadResult(list(completions), time.perf_counter() - started)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
