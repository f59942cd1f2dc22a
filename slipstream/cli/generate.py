"""`slipstream generate`, `resume`, `rollback` and `cancel`: one session of a running gateway."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, cast

import typer

from slipstream.cli.options import (
    FORMAT,
    SAMPLING,
    SPECULATION,
    AsJson,
    Connection,
    Drafters,
    MaxDraftTokens,
    MaxTokens,
    Model,
    NoSpeculation,
    Seed,
    Temperature,
    TopP,
    Workload,
    explained,
)
from slipstream.cli.waiting import SilenceWatch, summary
from slipstream.client.completion import Completion
from slipstream.client.options import GenerateOptions, RollbackOptions
from slipstream.client.sync_client import Client, Stream
from slipstream.speculation.sampling_params import ACCEPTANCE_RULES, DEPRECATED_RULES

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
JsonInstead = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")]
SessionId = Annotated[str, typer.Argument(help="The session_id that `slipstream generate --json` printed.")]


MixedArithmetic = Annotated[
    bool | None,
    typer.Option(
        "--mixed-arithmetic/--no-mixed-arithmetic",
        help="Whether the text may go on, marked, where no verifier is left that computes as the one that began it.",
        show_default="the gateway's",
    ),
]


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `generate` for its request."""

    model: Model = ""
    max_tokens: MaxTokens = 256
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, not part of the text; repeat for more.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Continue after the model's end-of-text token.")] = False
    workload: Workload = ""
    cache_salt: Annotated[str, typer.Option(help="Share KV caches only with sessions of the same salt.")] = ""
    priority: Annotated[int, typer.Option(help="Lower values are served first when memory is short.")] = 0
    mixed_arithmetic: MixedArithmetic = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", min=0, rich_help_panel=SAMPLING)] = (
        None
    )
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens with at least this share of the likeliest one's probability.", rich_help_panel=SAMPLING
        ),
    ] = None
    seed: Seed = None
    no_speculation: NoSpeculation = False
    max_draft_tokens: MaxDraftTokens = None
    drafters: Drafters = None
    acceptance: Annotated[
        str,
        typer.Option(
            help=f"Acceptance rule: {', '.join(ACCEPTANCE_RULES)}. Deprecated names of rejection: "
            f"{', '.join(DEPRECATED_RULES)}.",
            rich_help_panel=SPECULATION,
        ),
    ] = "coupled"
    prediction: Annotated[
        str | None,
        typer.Option(help="Expected output, for example a text to be edited.", rich_help_panel=SPECULATION),
    ] = None
    prediction_file: Annotated[
        Path | None,
        typer.Option(help="File with the expected output; - is standard input.", rich_help_panel=SPECULATION),
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output must match.", rich_help_panel=FORMAT)
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole output must match.", rich_help_panel=FORMAT)
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(help="File with a Lark grammar that the output must match.", rich_help_panel=FORMAT)
    ] = None
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The output must be a JSON object.", rich_help_panel=FORMAT)
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probability of each token and of this many alternatives.",
            min=0,
            rich_help_panel=FORMAT,
        ),
    ] = None

    def asked(self) -> GenerateOptions:
        """Raises BadParameter for files that cannot be read."""
        given = asdict(self)
        given["speculation"] = not given.pop("no_speculation")
        given["prediction"] = _prediction(self.prediction, given.pop("prediction_file"))
        for option in ("json_schema", "grammar"):
            if given[option] is not None:
                given[option] = _read(f"--{option.replace('_', '-')}", given[option])
        return cast(GenerateOptions, given)


def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    connection: Connection,
    completion: CompletionOptions,
    as_json: JsonInstead = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace the request and print its trace id at the end.")
    ] = False,
) -> None:
    """Complete PROMPT and stream the text."""
    if completion.logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs needs --json.")
    options = completion.asked()
    with explained("generate"), connection.client(trace=trace) as client:
        stream = client.stream(prompt, **options)
        try:
            print_stream(client, stream, as_json, completion.model)
            if not as_json and sys.stdout.isatty() and not completion.no_speculation:
                typer.echo(summary(stream.completion, client.list_models), err=True)
        finally:
            if trace:
                _print_trace_id(stream.completion)


def print_stream(client: Client, stream: Stream, as_json: bool, model: str = "") -> None:
    """Prints an output while it comes, or one JSON object at its end, and on standard error what it waits for. Ctrl-C
    ends the process with one sentence on how to go on: the gateway keeps the session for a while."""
    printed = stream.completion.begins
    try:
        with HeldInterrupt() as interrupt, SilenceWatch(client.list_models, model) as silence:
            for piece in stream:
                silence.piece_came()
                with interrupt.held():
                    if not as_json:
                        typer.echo(piece.text, nl=False)
                    printed = piece.offset + len(piece.token_ids)
    except KeyboardInterrupt:
        if session := stream.completion.session_id:
            rest = f"`slipstream resume {session} --offset {printed}` prints the rest"
            typer.echo(f"\nstopped; {rest}, `slipstream cancel {session}` ends it.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(json.dumps(stream.completion.report()) if as_json else "")


def _print_trace_id(completion: Completion) -> None:
    """Prints nothing after an interruption: only the end of a stream carries whether the request is traced."""
    if completion.trace_id:
        typer.echo(f"slipstream trace {completion.trace_id}", err=True)
    elif completion.finished.reason:
        typer.echo("the gateway did not trace it", err=True)


def _prediction(text: str | None, file: Path | None) -> str | None:
    if file is None:
        return text
    if text is not None:
        raise typer.BadParameter("give --prediction or --prediction-file, not both.")
    return _read("--prediction-file", file)


def _read(option: str, file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {file} cannot be read: {error}.") from error


def resume_session(
    *,
    session: SessionId,
    connection: Connection,
    offset: Annotated[int, typer.Option(help="Number of output tokens that you have already.", min=0)] = 0,
    mixed_arithmetic: MixedArithmetic = None,
    as_json: JsonInstead = False,
) -> None:
    """Stream the rest of SESSION's text, and continue the session if no gateway runs it."""
    with explained("resume"), connection.client(resume_s=0.0) as client:
        print_stream(client, client.resume(session, offset, mixed_arithmetic=mixed_arithmetic), as_json)


def roll_back_session(
    *,
    session: SessionId,
    connection: Connection,
    keep: Annotated[int, typer.Option(help="Number of output tokens to keep.", min=0)] = 0,
    text: Annotated[str | None, typer.Option(help="Text to append to the kept tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed for the rest; with the session's own seed the text repeats.", min=0)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most output tokens in total.", min=1)] = None,
    branch: Annotated[bool, typer.Option("--branch", help="Leave SESSION as it is and start a new one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Roll SESSION back to an earlier length, or branch from there; prints the session's id for `slipstream resume`."""
    options = RollbackOptions(seed=seed, max_tokens=max_tokens)
    if text is not None:
        options["edit"] = text
    with explained("rollback"), connection.client() as client:
        roll_back = client.branch if branch else client.rollback
        back = roll_back(session, keep, **options)
    typer.echo(json.dumps(asdict(back)) if as_json else back.session_id)


def cancel_session(session: SessionId, connection: Connection, as_json: AsJson = False) -> None:
    """End SESSION, whichever gateway runs it. Prints nothing but with --json."""
    with explained("cancel"), connection.client() as client:
        client.cancel(session)
    if as_json:
        typer.echo(json.dumps({"session_id": session, "cancelled": True}))


class HeldInterrupt:
    """Raises KeyboardInterrupt as Python does by itself, but not within `held`: there it waits until the end.

    It changes nothing outside of the main thread, or where Ctrl-C is ignored or handled otherwise.
    """

    def __init__(self) -> None:
        self._holding = self._waits = self._installed = False

    def __enter__(self) -> HeldInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._receive)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets the body end before an interrupt is raised."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._waits:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._waits = True
