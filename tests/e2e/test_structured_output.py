"""Through the whole running system, as a user asks for it: output of a grammar, and log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.load_generator import LoadResult, run_load
from benchmarks.prompts import held_out
from slipstream.cli.commands import app
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.grammars import END, LANGUAGES, SCHEMA, SUM

TOKENS = 60
STOP = verifier_pb2.FINISH_REASON_STOP


async def written(server: str, format: types_pb2.StructuredOutput, *, speculate: bool) -> LoadResult:
    requests = [
        gateway_pb2.GenerateRequest(
            prompt=prompt,
            max_tokens=TOKENS,
            structured_output=format,
            sampling=gateway_pb2.SamplingOptions(temperature=temperature, seed=seed, logit_bias={END: 8.0}),
            speculation=gateway_pb2.SpeculationOptions(disabled=not speculate),
            logprobs=True,
            top_logprobs=3,
        )
        for seed, prompt in enumerate(held_out(2, seed=6))
        for temperature in (0.0, 0.8)
    ]
    return await run_load(server, requests, 3)


FORMATS = {
    "schema": types_pb2.StructuredOutput(json_schema=SCHEMA),
    "sum": types_pb2.StructuredOutput(grammar=SUM),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_the_text_is_of_the_language_and_speculation_changes_nothing(server: str, name: str) -> None:
    plain = (await written(server, FORMATS[name], speculate=False)).completions
    load = await written(server, FORMATS[name], speculate=True)
    assert [one.token_ids for one in load.completions] == [one.token_ids for one in plain]
    ended = [one for one in plain if one.finished.reason == STOP]
    assert ended and all(LANGUAGES[name].holds(one.text) for one in ended)
    for drafted, without in zip(load.completions, plain, strict=True):
        for one, other in zip(drafted.logprobs, without.logprobs, strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=1e-4)


def asked(server: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["generate", "def f(", "--server", server, "--max-tokens", "60", *options])


def test_the_command_line_asks_for_structures_and_log_probabilities(server: str, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sum.lark"
    schema.write_text(SCHEMA)
    grammar.write_text('start: greeting " " name "!"\ngreeting: "hello" | "goodbye"\nname: "moon" | "sun"')
    report = json.loads(asked(server, "--json-schema", str(schema), "--json", "--logprobs", "2", "--seed", "3").stdout)
    assert LANGUAGES["schema"].holds(report["text"])
    assert [one["token_id"] for one in report["logprobs"]] == report["token_ids"]
    assert bytes(byte for one in report["logprobs"] for byte in one["bytes"]).decode() == report["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in report["logprobs"])
    greeting = asked(server, "--grammar", str(grammar), "--seed", "1").stdout.rstrip("\n")
    assert greeting in [f"{word} {name}!" for word in ("hello", "goodbye") for name in ("moon", "sun")]
    words = asked(server, "--regex", LANGUAGES["words"].structure.text, "--seed", "1").stdout
    assert LANGUAGES["words"].holds(words.rstrip("\n"))
    assert asked(server, "--json-object", "--seed", "1").stdout.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--regex", "(a"], 1, "BAD_GRAMMAR"),
        (["--regex", "a", "--ignore-eos"], 1, "ENDLESS_GRAMMAR"),
        (["--regex", "a", "--json-object"], 1, "give one of"),
        (["--json-schema", "/no/such/file"], 2, "cannot be read"),
        (["--logprobs", "21", "--json"], 1, "at most 20"),
    ],
)
def test_the_command_line_reports_each_error_with_its_exit_code(
    server: str, options: list[str], code: int, message: str
) -> None:
    done = asked(server, *options)
    assert done.exit_code == code
    assert message in done.stderr
