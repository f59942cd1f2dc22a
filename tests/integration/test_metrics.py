"""What Prometheus gets from each role, over HTTP, is what happened: real services in one process, emulated models."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.contextvars import get_contextvars

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running as drafter_running
from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from slipstream.client.client import complete
from slipstream.client.completion import Completion
from slipstream.engine.factory import open_engine
from slipstream.errors import InvalidArgument, ResourceExhausted
from slipstream.rpc.channel import channel
from slipstream.telemetry.metrics import DECLARED, ROLES
from slipstream.v1 import gateway_pb2
from slipstream.version import running_version
from tests.support.fleet import verifier
from tests.support.prometheus import problems_of_metrics
from tests.support.scraping import Page, fetch, scrape

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
TOKENS = 48
GEN_AI_BOUNDS = {
    "time_to_first_token": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10",
    "time_per_output_token": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5",
    "request_duration": "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
}
"""Of OpenTelemetry's conventions for `gen_ai.server.*`: those of several servers add up over equal buckets."""
FREE = "127.0.0.1:0"


@dataclass
class System:
    line: grpc.aio.Channel
    addresses: dict[str, str]
    """Of the metrics of each role."""

    async def generate(self, first: int = 7, **request: Any) -> Completion:
        asked = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=[first, 8, 9]),
            max_tokens=TOKENS,
            ignore_eos=True,
            sampling=gateway_pb2.SamplingOptions(temperature=0.0),
        )
        asked.MergeFrom(gateway_pb2.GenerateRequest(**request))
        return await complete(self.line, asked)

    async def pages(self) -> dict[str, Page]:
        return {role: await scrape(address) for role, address in self.addresses.items()}

    async def settled(self) -> dict[str, Page]:
        """The pages once nothing is on its way between gateway and verifier."""
        bytes_, said, heard = "slipstream_link_bytes_total", {"direction": "sent"}, {"direction": "received"}
        async with asyncio.timeout(60):
            while True:
                pages = await self.pages()
                gateway, deciding = pages["gateway"], pages["verifier"]
                there = gateway.value(bytes_, **said) == deciding.value(bytes_, peer="gateway", **heard)
                back = gateway.value(bytes_, **heard) == deciding.value(bytes_, peer="gateway", **said)
                if there and back and not deciding.value("slipstream_kv_blocks_used"):
                    return pages


@asynccontextmanager
async def system(**config: Any) -> AsyncIterator[System]:
    draft = DrafterConfig(model="emulated:acceptance=0.8&fanout=0.7", listen=FREE, metrics_listen=FREE, grace_s=0.0)
    async with (
        drafter_running(draft) as drafting,
        verifier(
            open_engine("emulated:base_ms=15&token_ms=0.3", kv_tokens=100_000), metrics_listen=FREE, measure_s=0.2
        ) as deciding,
    ):
        settings = GatewayConfig(
            verifiers=(deciding.address,),
            tokenizer=TOKENIZER,
            listen=FREE,
            metrics_listen=FREE,
            drafters=(f"model={drafting.address}",),
            grace_s=0.0,
            **config,
        )
        async with running(settings, GatewayDependencies(random.Random(7).getrandbits)) as gateway:
            await gateway.ready()
            while not all(known.present for known in gateway.router.drafters):
                await gateway.router.changes.wait()
            servers = {"gateway": gateway.server, "verifier": deciding.server, "drafter": drafting.server}
            async with channel(gateway.address) as line:
                yield System(line, {role: server.metrics_address for role, server in servers.items()})


async def test_every_role_exposes_exactly_the_metrics_declared_for_it() -> None:
    async with system() as running:
        for role, page in (await running.pages()).items():
            assert role in ROLES
            declared = {metric.name: (metric.kind, metric.help) for metric in DECLARED if role in metric.roles}
            assert page.names == declared


async def test_names_follow_prometheus_rules() -> None:
    async with system() as running:
        await running.generate()
        pages = [await asyncio.to_thread(fetch, address, "text/plain") for address in running.addresses.values()]
    problems = {problem for page in pages for problem in problems_of_metrics(page)}
    assert {name for name, _ in problems if not name.startswith("vllm:")} == {"slipstream_kv_blocks_total"}
    assert {problem for name, problem in problems if name.startswith("vllm:")} == {
        "metric names should not contain ':'"
    }, "vLLM's own choice"


async def test_metrics_equal_the_statistics_that_clients_received() -> None:
    async with system(verifier_price=3.0, drafter_prices=("model=0.5",), slo_ttft_s=30.0) as running:
        said = [await running.generate(first, workload=kind) for first, kind in enumerate(["chat", "code", "chat"], 7)]
        pages = await running.settled()
    told = [each.finished.statistics for each in said]
    gateway, deciding, drafting = pages["gateway"], pages["verifier"], pages["drafter"]
    assert sum(each.accepted for each in told) > 0

    for name, number in {
        "slipstream_rounds_total": "rounds",
        "slipstream_rounds_with_drafts_total": "rounds_with_drafts",
        "slipstream_drafted_tokens_total": "drafted",
        "slipstream_accepted_tokens_total": "accepted",
        "slipstream_round_hits_total": "hits",
    }.items():
        assert gateway.value(name) == sum(getattr(each, number) for each in told), name
        assert gateway.value(name, workload="code") == getattr(told[1], number), name
    for name, seconds in {"wait": "wait_s", "verify": "verify_s", "bubble": "bubble_s"}.items():
        counted = gateway.value(f"slipstream_round_{name}_seconds_total")
        assert counted == pytest.approx(sum(getattr(each, seconds) for each in told))
    assert gateway.value("slipstream_emitted_tokens_total") == 3 * TOKENS
    misses = sum(sum(each.misses.values()) for each in told)
    assert gateway.value("slipstream_round_misses_total") == misses > 0

    drafted, accepted = sum(each.drafted for each in told), sum(each.accepted for each in told)
    share = {"drafter": "model", "method": "model", "model": "emulated"}
    assert gateway.value("slipstream_candidates_verified_total", **share) == drafted
    assert gateway.value("slipstream_candidates_accepted_total", **share) == accepted
    assert gateway.value("slipstream_candidates_accepted_total", workload="code") == told[1].accepted
    assert gateway.value("slipstream_candidate_rounds_total", **share) == sum(each.rounds_with_drafts for each in told)
    assert [each.drafters[0].rounds for each in told] == [each.rounds_with_drafts for each in told]

    # The same under vLLM's names, and by depth as the verifier saw it.
    spec = "vllm:spec_decode_num_"
    assert gateway.value(f"{spec}drafts_total") == sum(each.rounds_with_drafts for each in told)
    assert gateway.value(f"{spec}draft_tokens_total") == drafted
    assert gateway.value(f"{spec}accepted_tokens_total") == accepted
    positions = gateway.by(f"{spec}accepted_tokens_per_pos_total", "position")
    assert sum(positions.values()) == accepted
    depths = deciding.by("slipstream_depth_accepted_tokens_total", "depth")
    assert {str(int(position) + 1): count for position, count in positions.items()} == depths
    reached = {depth: gateway.value("slipstream_accepted_by_depth_total", depth=depth) for depth in depths}
    assert reached == depths
    assert gateway.value("slipstream_accepted_by_depth_total", workload="code") == told[1].accepted
    assert deciding.value("slipstream_depth_drafted_tokens_total") == drafted
    assert deciding.value("slipstream_rejected_tokens_total") == drafted - accepted
    assert deciding.value("slipstream_verifier_committed_tokens_total") == 3 * TOKENS

    check_other_names(gateway, said[0].started.model)

    # Steps and passes.
    steps = deciding.value("slipstream_verifier_step_seconds_count")
    assert steps >= sum(each.rounds for each in told)
    assert deciding.value("slipstream_verifier_step_tokens_sum") >= drafted + sum(each.rounds for each in told)
    busy = deciding.value("slipstream_verifier_step_seconds_sum")
    assert 0.0 < deciding.value("slipstream_rejected_seconds_total") < busy
    assert sum(each.bubble_s for each in told) <= deciding.value("slipstream_draft_wait_seconds_total") + 1e-3
    assert drafting.value("slipstream_drafter_busy_seconds_total") == pytest.approx(
        drafting.value("slipstream_drafter_pass_seconds_sum")
    )
    # One session after the other: it never needs more than one drafter, and that one runs ahead.
    needed = drafting.value("slipstream_drafter_needed_seconds_total")
    assert 0.0 < needed < drafting.value("slipstream_drafter_busy_seconds_total")
    assert drafting.value("slipstream_drafter_drafted_candidates_total") >= drafting.value(
        "slipstream_drafter_sent_candidates_total"
    )
    assert drafting.value("slipstream_drafter_sent_candidates_total") >= drafted

    # What one end says the other one hears (`settled`); of the drafter's last frames some may still be on their way.
    assert gateway.value("slipstream_link_bytes_total", direction="sent") > 0
    told_ = drafting.value("slipstream_link_bytes_total", peer="verifier", direction="sent")
    assert 0 < deciding.value("slipstream_link_bytes_total", peer="drafter", direction="received") <= told_

    # Nobody is there any more; every block is free.
    for name in ("slipstream_verifier_sessions", "slipstream_verifier_waiting_sessions", "slipstream_kv_blocks_used"):
        assert deciding.value(name) == 0, name
    assert deciding.value("slipstream_kv_blocks_total") == deciding.value("slipstream_kv_blocks") > 0
    builds = [page.value("slipstream_build_info", role=role, version=running_version()) for role, page in pages.items()]
    assert builds == [1, 1, 1]
    for name in ("slipstream_gateway_sessions", "slipstream_gateway_waiting_sessions", "slipstream_store_lag_seconds"):
        assert gateway.value(name) == 0, name

    # Requests, and what they cost.
    assert gateway.value("slipstream_requests_total", outcome="length") == 3
    assert gateway.value("slipstream_requests_good_total", workload="chat") == 2
    assert gateway.value("slipstream_good_tokens_total") == 3 * TOKENS
    assert gateway.by("slipstream_slo_seconds", "objective") == {"ttft": 30.0, "tpot": 0.0}
    assert gateway.by("slipstream_cost_per_hour", "role") == {"verifier": 3.0, "drafter": 0.5}
    assert gateway.value("slipstream_workers") == 2
    assert gateway.by("slipstream_drafter_breaker_state", "drafter") == {"model": 0}
    assert gateway.value("slipstream_store_write_seconds_count", operation="create") == 3
    assert gateway.value("slipstream_store_write_seconds_count", operation="append") > 3
    assert gateway.samples("slipstream_store_errors_total") == []

    # TTFT, TPOT = (E2E - TTFT) / (n - 1), and the time between rounds, which adds up to what stands between.
    ttft, e2e = sum(each.ttft_s for each in told), sum(each.e2e_s for each in told)
    assert gateway.value("slipstream_time_to_first_token_seconds_sum") == pytest.approx(ttft)
    assert gateway.value("slipstream_request_seconds_sum") == pytest.approx(e2e)
    tpot = gateway.value("slipstream_time_per_output_token_seconds_sum")
    assert tpot == pytest.approx((e2e - ttft) / (TOKENS - 1))
    assert gateway.value("slipstream_inter_token_seconds_sum") <= e2e - ttft
    assert gateway.value("slipstream_inter_token_seconds_count") == sum(each.rounds - 1 for each in told)


def check_other_names(gateway: Page, model: str) -> None:
    """After three requests of three prompt tokens each: vLLM's names and OpenTelemetry's say what ours say."""
    vllm = {"model_name": model, "engine": "0"}
    assert gateway.value("slipstream_prompt_tokens_total", workload="chat") == 2 * 3
    for name, expected in {
        "prompt_tokens_total": 3 * 3,
        "generation_tokens_total": 3 * TOKENS,
        "request_success_total": 3,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
    }.items():
        assert gateway.samples(f"vllm:{name}", **vllm) and gateway.value(f"vllm:{name}", **vllm) == expected, name
    assert gateway.value("vllm:request_success_total", finished_reason="length") == 3
    gen_ai = {"gen_ai_operation_name": "text_completion", "gen_ai_request_model": vllm["model_name"]}
    for name, other, labels in (
        ("vllm:time_to_first_token_seconds", "time_to_first_token_seconds", vllm),
        ("vllm:inter_token_latency_seconds", "inter_token_seconds", vllm),
        ("vllm:request_time_per_output_token_seconds", "time_per_output_token_seconds", vllm),
        ("vllm:e2e_request_latency_seconds", "request_seconds", vllm),
        ("gen_ai_server_time_to_first_token_seconds", "time_to_first_token_seconds", gen_ai),
        ("gen_ai_server_time_per_output_token_seconds", "time_per_output_token_seconds", gen_ai),
        ("gen_ai_server_request_duration_seconds", "request_seconds", gen_ai),
    ):
        for ending in ("_count", "_sum"):
            ours = gateway.value(f"slipstream_{other}{ending}")
            assert ours > 0 and gateway.value(name + ending, **labels) == pytest.approx(ours), name
        assert gateway.value(f"{name}_bucket", le="+Inf") == gateway.value(f"{name}_count")
        bounds = [sample.value for sample in gateway.samples(f"{name}_bucket")]
        assert bounds == sorted(bounds), "one series over both workloads, its buckets in order"
    for name, bounds_s in GEN_AI_BOUNDS.items():
        buckets = gateway.samples(f"gen_ai_server_{name}_seconds_bucket")
        assert [float(each.labels["le"]) for each in buckets] == [*map(float, bounds_s.split()), float("inf")], name


async def test_errors_and_outcomes_of_requests_are_counted_by_code_and_reason() -> None:
    async with system(max_sessions=1) as running:
        with pytest.raises(InvalidArgument):
            await running.generate(workload="x" * 65)
        idle = await scrape(running.addresses["gateway"])
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert len(idle.samples(f"vllm:{name}")) == 1, "a load balancer reads it before the first request"
        first = asyncio.create_task(running.generate(max_tokens=200))
        page = await scrape(running.addresses["gateway"])
        while not page.value("vllm:kv_cache_usage_perc"):
            page = await scrape(running.addresses["gateway"])
        assert page.value("slipstream_gateway_sessions") == page.value("vllm:num_requests_running") == 1
        with pytest.raises(ResourceExhausted):
            await running.generate()
        await first
        page = await scrape(running.addresses["gateway"])
    told = {
        (sample.labels["code"], sample.labels["reason"]): sample.value
        for sample in page.samples("slipstream_rpc_errors_total", method="slipstream.v1.GatewayService/Generate")
    }
    assert told == {("INVALID_ARGUMENT", "LABEL_TOO_LONG"): 1, ("RESOURCE_EXHAUSTED", "SESSIONS"): 1}
    outcomes = {sample.labels["outcome"]: sample.value for sample in page.samples("slipstream_requests_total")}
    assert outcomes == {"refused": 1, "length": 1}


async def test_a_slow_request_is_one_line_that_names_its_session(caplog: pytest.LogCaptureFixture) -> None:
    sessions: list[Any] = []
    caplog.handler.addFilter(lambda record: sessions.append(get_contextvars().get("session")) or True)
    async with system(slow_request_s=0.01) as running:
        caplog.clear()
        sessions.clear()
        said = await running.generate()
    told = [(record.getMessage(), name) for record, name in zip(caplog.records, sessions, strict=True)]
    assert [name for message, name in told if message == "slow request"] == [said.started.session_id]
