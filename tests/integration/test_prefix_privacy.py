"""What one key had computed shortens no other key's prefill, whichever way its sessions come to a prompt: by
generating, resuming, rolling back or branching. Prefilled tokens are counted, which is what a client could time."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.gateway import GatewayDependencies, running
from slipstream.client.gateway_endpoint import GatewayEndpoint, digest, new_key
from slipstream.engine.engine import ModelOutput
from slipstream.engine.factory import open_engine
from slipstream.engine.segment import Segment
from slipstream.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.fleet import verifier

TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "target")
PROMPT = [7, 8, 9] * 40
"""Several blocks of KV."""
SHORT = 40
"""Tokens that are computed at most where the prompt's blocks are shared: the last one and the output."""
KEYS = {"alice": new_key(), "bob": new_key()}


class House:
    """A gateway with two keys before a verifier that counts the committed tokens it computes."""

    def __init__(self) -> None:
        self.computed = 0
        self._stubs: dict[str, Any] = {}

    async def start(self, folder: Path, stack: AsyncExitStack) -> None:
        engine = open_engine("emulated:", kv_tokens=100_000)
        forward = engine.forward

        def counted(segments: list[Segment]) -> ModelOutput:
            self.computed += sum(len(segment.pending) for segment in segments)
            return forward(segments)

        engine.forward = counted  # type: ignore[method-assign]
        keys = folder / "keys.toml"
        keys.write_text("".join(f'{name} = {{ sha256 = "{digest(key).hex()}" }}\n' for name, key in KEYS.items()))
        target = await stack.enter_async_context(verifier(engine))
        config = GatewayConfig(
            verifiers=(target.address,), tokenizer=TOKENIZER, listen="127.0.0.1:0", grace_s=0.0, api_keys=str(keys)
        )
        gateway = await stack.enter_async_context(running(config, GatewayDependencies(secrets.randbits)))
        await gateway.ready()
        for name, key in KEYS.items():
            line = await stack.enter_async_context(GatewayEndpoint(gateway.address, key).channel())
            self._stubs[name] = gateway_pb2_grpc.GatewayServiceStub(line)

    async def generate(self, name: str, prompt: list[int], salt: str = "") -> tuple[str, int]:
        """The session's id, and how many tokens were computed for it."""
        asked = gateway_pb2.GenerateRequest(
            prompt_token_ids=gateway_pb2.TokenIds(token_ids=prompt), max_tokens=8, cache_salt=salt
        )
        return await self._read(self._stubs[name].Generate(asked))

    async def rolled_back(self, name: str, session: str, edit: list[int], *, branch: bool) -> int:
        """Tokens that are computed for the session once it is rolled back to an edit behind its prompt."""
        rolled = await self._stubs[name].Rollback(
            gateway_pb2.RollbackRequest(
                session_id=session,
                token_ids=gateway_pb2.TokenIds(token_ids=edit),
                branch=branch,
                max_tokens=len(edit) + 8,
            )
        )
        return (await self._read(self._stubs[name].Resume(gateway_pb2.ResumeRequest(session_id=rolled.key.id))))[1]

    async def _read(self, stream: Any) -> tuple[str, int]:
        before, session = self.computed, ""
        async for event in stream:
            session = event.started.session_id or session
        return session, self.computed - before


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        made = House()
        await made.start(tmp_path, stack)
        yield made


@pytest.mark.parametrize("salt", ["", "same"])
async def test_a_prompt_that_one_key_had_computed_is_computed_again_for_another(house: House, salt: str) -> None:
    first = (await house.generate("alice", PROMPT, salt))[1]
    assert (await house.generate("alice", PROMPT, salt))[1] <= SHORT < first  # control: its own is shared
    assert (await house.generate("bob", PROMPT, salt))[1] == first
    assert (await house.generate("bob", PROMPT, salt))[1] <= SHORT


@pytest.mark.parametrize("branch", [False, True], ids=["rollback", "branch"])
async def test_a_text_that_one_key_had_computed_is_computed_again_for_anothers_edit(house: House, branch: bool) -> None:
    """An edit could spell what another key's prompt is guessed to be."""
    secret = PROMPT
    await house.generate("alice", [1, *secret])
    for name, shared in (("bob", False), ("alice", True)):  # the other way round bob would have computed it himself
        session = (await house.generate(name, [1]))[0]
        computed = await house.rolled_back(name, session, secret, branch=branch)
        assert (computed <= SHORT) is shared
    session = (await house.generate("alice", [2]))[0]
    await house.rolled_back("alice", session, secret, branch=branch)
    assert (await house.generate("bob", [2, *secret]))[1] > SHORT  # nor does what an edit had computed help another
    assert (await house.generate("alice", [2, *secret]))[1] <= SHORT
