"""A conversation is a prompt that the gateway writes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from measurement.cli.doctor import doctor
from slipstream.cli.options import expanded
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.serving.fit import check_fit
from slipstream.tokenizer.vocabulary import template_warning
from slipstream.v1 import gateway_pb2, types_pb2
from tests.support.gateway_calls import left_after
from tests.support.scripted_gateway import Front, Setting

TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.name }}
{% endfor %}{% if tools %}{{ tools[0].name }}{% endif %}{{ mood }}<assistant>"""
SAID = [
    gateway_pb2.ChatMessage(role="system", content="Be brief."),
    gateway_pb2.ChatMessage(role="user", content="Hi", fields_json=json.dumps({"name": "Ann"})),
]


@pytest.fixture
async def front(setting: Setting, tmp_path: Path) -> Front:
    file = tmp_path / "template"
    file.write_text(TEMPLATE)
    return await setting.front(setting.verifier(limit=9), chat_template=str(file))


async def test_a_conversation_is_answered_in_the_models_template_and_resumed_like_any_other(front: Front) -> None:
    chat = gateway_pb2.Chat(messages=SAID, tools_json='[{"name": "clock"}]', template_variables_json='{"mood": "good"}')
    answer = await left_after(front, prompt=None, chat=chat)
    text = "<system>Be brief.\n<user>HiAnn\nclockgood<assistant>"
    assert front.tokenizer.decode(answer.started.prompt_token_ids) == text
    front.verifiers[0].limit = None
    await front.resume(answer.started.session_id, answer)
    assert answer.tokens == front.verifiers[0].script[:40]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools_json", "{}"),
        ("tools_json", "[" * 100_000),
        ("template_variables_json", "[]"),
        ("template_variables_json", "{"),
    ],
)
async def test_json_that_cannot_be_read_is_refused_by_name(front: Front, field: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as caught:
        await front.generate(prompt=None, chat=gateway_pb2.Chat(messages=SAID, **{field: value}))
    assert caught.value.reason == "NOT_JSON"


async def test_a_conversation_has_a_bounded_number_of_messages(front: Front) -> None:
    many = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage()] * 10_001)
    with pytest.raises(InvalidArgument, match="10000"):
        await front.generate(prompt=None, chat=many)


async def test_a_gateway_without_a_template_names_the_setting(setting: Setting) -> None:
    front = await setting.front(setting.verifier())
    with pytest.raises(FailedPrecondition, match="GATEWAY_CHAT_TEMPLATE"):
        await front.generate(prompt=None, chat=gateway_pb2.Chat(messages=SAID))


async def test_a_drafter_with_another_template_is_served_with_a_warning(setting: Setting) -> None:
    setting.model.chat_template_fingerprint = "target's"
    drafters = [
        f"{name}={await setting.drafter(name=name, chat_template_fingerprint=name)}" for name in ("target's", "other")
    ]
    front = await setting.front(setting.verifier(), drafters=tuple(drafters))
    served: list[gateway_pb2.ServedDrafter] = []
    while len([each for each in served if each.HasField("model")]) < 2:
        models = await front.stub.ListModels(gateway_pb2.ListModelsRequest())
        served = list(models.models[0].drafters)
    assert {each.name: bool(each.warning) for each in served} == {"target's": False, "other": True}
    assert not any(each.mismatch for each in served)


async def test_the_doctor_and_serving_name_a_drafter_with_another_template(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    setting.model.chat_template_fingerprint = "target's"
    same = await setting.drafter()
    other = await setting.drafter(name="odd", chat_template_fingerprint="other")
    front = await setting.front(setting.verifier())
    await asyncio.to_thread(expanded(doctor), worker=[*front.addresses, same, other])
    lines = [line for line in capsys.readouterr().out.splitlines() if "template" in line]
    assert len(lines) == 1 and lines[0].startswith(f"ok    drafter {other}: ") and "odd has another chat" in lines[0]
    await check_fit(front.addresses[0], [same, other])
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("slipstream serve: ") and "odd has another chat template" in line


async def test_serving_warns_of_models_without_their_fast_forward_pass(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, verifier and drafter alike."""
    slow = await setting.drafter(name="slow", forward_notice="the other reason")
    fast = await setting.drafter(name="fast")
    setting.model.forward_notice = "its fast forward pass is left out"
    front = await setting.front(setting.verifier())
    await check_fit(front.addresses[0], [slow, fast])
    lines = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert lines == [
        f"slipstream serve: WARNING: {setting.model.name}: its fast forward pass is left out",
        "slipstream serve: WARNING: slow: the other reason",
    ]


def test_a_lookup_needs_no_template() -> None:
    target = types_pb2.ModelInfo(name="target", vocabulary_fingerprint="v", chat_template_fingerprint="t")
    without = types_pb2.ModelInfo(name="base", vocabulary_fingerprint="v")
    assert template_warning(types_pb2.ModelInfo(), target) == ""
    assert template_warning(target, target) == template_warning(target, without) == ""
    assert "base has no chat template" in template_warning(without, target)
