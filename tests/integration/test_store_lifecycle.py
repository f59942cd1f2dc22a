"""A store over its life: what a session takes and when it is gone, and a backup from which sessions go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import redis

from gateway.store.redis import RedisStore
from slipstream.v1 import gateway_pb2
from tests.fleet import emulated_text, until
from tests.follower import Follower
from tests.integration.test_store_faults import TOKENS, system
from tests.redis_server import redis_process
from tests.stores import connected, record

SESSIONS, PROMPT_TOKENS, OUTPUT_TOKENS = 200, 300, 1200


def log_bytes(tokens: int, params: int) -> int:
    """The formula of docs/deployment.md, *The store*: 4 bytes a token, as much again for growth, the request, and two
    keys with their fields."""
    return 2 * 4 * tokens + params + 2048


async def test_a_session_takes_what_the_document_says_and_has_an_end(tmp_path: Path) -> None:
    with redis_process(tmp_path) as server, redis.Redis.from_url(server.url) as asked:
        async with connected(server.url) as client:
            store = RedisStore(client, owner="a", ttl_s=3600.0, lease_s=10.0)
            before = asked.info("memory")["used_memory"]
            for _ in range(SESSIONS):
                made = record(prompt_length=PROMPT_TOKENS, tokens=tuple(range(PROMPT_TOKENS)), params=b"x" * 200)
                await store.create(made)
                for start in range(PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS, 40):
                    await store.append(made.id, made.epoch, start, list(range(40)))
            taken = (asked.info("memory")["used_memory"] - before) / SESSIONS
        most = log_bytes(PROMPT_TOKENS + OUTPUT_TOKENS, 200)
        print(f"{taken:.0f} bytes a session, at most {most}")
        assert 4 * (PROMPT_TOKENS + OUTPUT_TOKENS) < taken < most
        left = [asked.pttl(key) for key in asked.scan_iter("*:*")]
        assert len(left) == 2 * SESSIONS and all(0 < each <= 3_600_000 for each in left)


async def test_sessions_go_on_from_a_backup(tmp_path: Path) -> None:
    """One that had ended, and one in the middle of its text, whose gateway and store are both gone."""
    with redis_process(tmp_path / "first", "--appendonly", "yes") as server:
        async with system(None, store=server.url) as stub:
            ended = Follower(stub, [3, 8, 9], TOKENS)
            await ended.reading
            broken = Follower(stub, [4, 8, 9], TOKENS)
            await until(lambda: len(broken.tokens) > 40)
            server.ask("SAVE")
        shutil.copy(tmp_path / "first" / "dump.rdb", tmp_path)
    (tmp_path / "second").mkdir()
    shutil.move(tmp_path / "dump.rdb", tmp_path / "second")
    # A server with a log reads that alone: it begins without one, and is told to write one from now on.
    with redis_process(tmp_path / "second") as restored:
        restored.ask("CONFIG", "SET", "appendonly", "yes")
        async with system(None, store=restored.url) as stub:
            for text in (ended, broken):
                request = gateway_pb2.ResumeRequest(session_id=text.session_id)
                tokens = [token async for event in stub.Resume(request) for token in event.delta.token_ids]
                assert tokens == emulated_text(text.prompt, TOKENS)
