"""An interrupt that comes while a piece is printed: the text goes on behind that piece, not with it."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from slipstream.cli.generate import INTERRUPTED, HeldInterrupt, print_stream
from slipstream.client.completion import Completion, Piece


class Texts:
    """Four pieces of two tokens."""

    def __init__(self) -> None:
        self.completion = Completion()
        self.completion.started.session_id = "s"

    def __iter__(self) -> Any:
        return iter([Piece(2 * number, (1, 2), f"<{number}>", ()) for number in range(4)])


@pytest.mark.parametrize("interrupted", [0, 2])
def test_an_interrupt_counts_exactly_the_pieces_that_were_printed(
    interrupted: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = typer.echo

    def echo_interrupted(text: str, **options: Any) -> None:
        echo(text, **options)
        if text == f"<{interrupted}>":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(typer, "echo", echo_interrupted)
    with pytest.raises(typer.Exit) as ended:
        print_stream(SimpleNamespace(list_models=None), Texts(), as_json=False)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert ended.value.exit_code == INTERRUPTED
    assert printed.out == "".join(f"<{number}>" for number in range(interrupted + 1))
    assert f"slipstream resume s --offset {2 * interrupted + 2}" in printed.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_of_a_held_part_an_interrupt_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupt() as interrupt:
        with interrupt.held():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it did not come")


def test_other_threads_and_other_handlers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = SimpleNamespace(handler=None)

    def enter() -> None:
        with HeldInterrupt() as interrupt, interrupt.held():
            entered.handler = signal.getsignal(signal.SIGINT)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered.handler is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        enter()
        assert entered.handler is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
