"""The table of drafting methods: every row opens, and one row is all that a new method needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable
from importlib import import_module
from typing import Any

import pytest

from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.proposers import registry
from slipstream.proposers.base import (
    OpenedProposer,
    Proposal,
    ProposedNode,
    ProposerContext,
    ProposerSettings,
    any_vocabulary,
)
from slipstream.proposers.registry import METHODS, ProposerMethod, find_method, gives_distribution, needs_prediction
from slipstream.rpc.channel import channel
from slipstream.rpc.proto_conversion import sampling_to_proto
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_row_names_a_factory_that_is_there(method: ProposerMethod) -> None:
    module, _, function = method.factory.partition(":")
    assert callable(getattr(import_module(module), function))


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, slipstream.proposers.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_drafter_without_a_model_runs_without_torch() -> None:
    program = """
import asyncio, sys
from drafter_svc.config import DrafterConfig
from drafter_svc.drafter import running

async def main():
    async with running(DrafterConfig(method="ngram", listen="127.0.0.1:0", grace_s=0.0)):
        pass

asyncio.run(main())
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unknown_method_is_refused_by_name_and_has_no_properties() -> None:
    with pytest.raises(InvalidArgument, match="choose model, ngram"):
        find_method("psychic")
    with pytest.raises(InvalidArgument, match="psychic"):
        DrafterConfig(method="psychic")
    assert not gives_distribution("psychic") and not needs_prediction("psychic")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "vllmm"}, "DRAFTER_ENGINE='vllmm'; choose one of embedded, vllm"),
        ({"vllm_args": "--quantization fp8"}, "DRAFTER_VLLM_ARGS needs DRAFTER_ENGINE=vllm"),
        ({"engine": "vllm", "method": "suffix"}, "the method 'suffix' has none"),
        ({"engine": "vllm", "model": "emulated:base_ms=1"}, "has no weights; use DRAFTER_ENGINE=embedded"),
        ({"engine": "vllm", "translate_for": "other"}, "DRAFTER_TRANSLATE_FOR needs trees"),
        ({"engine": "vllm", "device": "cpu"}, "DRAFTER_DEVICE=cpu is for the embedded engine"),
        ({"engine": "vllm", "expand": 4}, "DRAFTER_EXPAND=4; vLLM proposes chains"),
    ],
)
def test_settings_that_a_drafters_engine_does_not_support_are_refused(settings: dict[str, Any], sentence: str) -> None:
    DrafterConfig(model="folder", engine="vllm", vllm_args="--quantization fp8", expand=1)
    with pytest.raises(InvalidArgument, match=sentence):
        DrafterConfig(**({"model": "folder"} | settings))


class LastTokenProposer:
    """Proposes the last token again."""

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        return [
            Proposal([ProposedNode(node, one.tokens[one.length - 1], -0.1) for node in one.expand], one.length)
            for one in contexts
        ]

    def close_sequence(self, handle: Hashable) -> None:
        """It keeps nothing."""


def open_example(settings: ProposerSettings) -> OpenedProposer:
    return OpenedProposer(any_vocabulary("example"), LastTokenProposer())


async def test_one_row_adds_a_method_and_a_drafter_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ProposerMethod("example", f"{__name__}:open_example", "the last token again")
    monkeypatch.setitem(registry.METHODS, "example", row)
    config = DrafterConfig(method="example", listen="127.0.0.1:0", grace_s=0.0)
    async with running(config) as drafter, channel(drafter.address) as line:
        served = await worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest())
        assert (served.method, served.model.name) == ("example", "example")
        call = drafter_pb2_grpc.DrafterServiceStub(line).Draft()
        opened = drafter_pb2.DraftOpen(
            prefix=types_pb2.Prefix(token_ids=[3, 9], prompt_length=2),
            sampling=sampling_to_proto(SamplingParams(temperature=0.0)),
            target=types_pb2.ModelInfo(name="any", vocabulary_size=20, max_length=100),
            policy=drafter_pb2.DraftPolicy(max_nodes=3),
            max_length=50,
        )
        await call.write(drafter_pb2.DraftRequest(commands=[drafter_pb2.DraftCommand(session=1, epoch=1, open=opened)]))
        tokens: list[int] = []
        async for response in call:
            assert not response.refusals
            tokens += [token for frame in response.candidates for token in frame.token_ids]
            if len(tokens) == 3:
                break
        call.cancel()
    assert tokens == [9, 9, 9]
