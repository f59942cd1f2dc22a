"""`slipstream doctor`: whether what serves is well, or whether a pair is worth serving."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from measurement.cli.diagnosis import diagnose
from slipstream.cli.options import AsJson, Connection, explained, need_installed
from slipstream.errors import InvalidArgument
from slipstream.proposers.registry import find_method
from slipstream.serving.default_drafters import shipped_draft_for
from slipstream.tokenizer.vocabulary import check_folder

PAIR = "A pair before it serves"
"""Group of options in `--help`."""
NOT_WORTH_IT = 3
"""Exit status for a pair that fits and does not pay. Typer's own for bad usage is 2."""


@dataclass(frozen=True)
class PairOptions:
    """Options of `doctor` for a pair that does not serve yet."""

    target: Annotated[str, typer.Option(help="A target model, to try a drafter with here.", rich_help_panel=PAIR)] = ""
    draft: Annotated[str, typer.Option(help="Its draft model, or the folder of heads.", rich_help_panel=PAIR)] = ""
    drafter: Annotated[str, typer.Option(help="The method that drafts with it.", rich_help_panel=PAIR)] = "model"
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, as for `bench`; a few of four kinds.", rich_help_panel=PAIR)
    ] = None
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2, rich_help_panel=PAIR)] = 96
    translate: Annotated[
        bool,
        typer.Option(
            "--translate", help="The draft model has another tokenizer and translates its tokens.", rich_help_panel=PAIR
        ),
    ] = False
    dtype: Annotated[str, typer.Option(help="Type of weights and KV.", rich_help_panel=PAIR)] = "auto"


def doctor(
    *,
    worker: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a verifier or drafter; repeat it for more.")
    ] = None,
    connection: Connection,
    pair: PairOptions,
    as_json: AsJson = False,
) -> None:
    """Check each --worker's model and load, and request one text from each gateway with and without speculation.

    With --target a pair is tried before it serves: vocabulary, templates, acceptance on your prompts by depth, slice
    and context length, memory, and the speed-up to expect here. The last line is the verdict, `ship` or `do not ship`,
    by the rule of the reports of `slipstream train`. Certificates for workers come from SLIPSTREAM_TLS_FOLDER, as for
    the services. Exit status: 0 for all well and `ship`, 1 if anything is wrong or fails, 3 for a pair that would
    serve and is not worth it (`do not ship`).
    """
    if pair.target:
        _try_pair(pair, as_json=as_json)
        return
    gateways = connection.endpoints() if connection.server or not worker else []
    findings = asyncio.run(diagnose(worker or [], gateways))
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    for finding in () if as_json else findings:
        typer.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.text}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _try_pair(pair: PairOptions, *, as_json: bool) -> None:
    with explained("doctor"):
        need_installed("torch", "transformers")
        check_folder(pair.target)
        draft = _draft_of(pair)
        from measurement.cli.pair_report import as_json as listed
        from measurement.cli.pair_report import render
        from measurement.load.workload import read_workload
        from measurement.pairs.check import PROMPTS, check_pair
        from measurement.pairs.figures import PairCheck

        asked = PROMPTS if pair.prompts is None else read_workload(pair.prompts)
        check = PairCheck(pair.target, draft, pair.drafter, translated=pair.translate)
        check_pair(check, asked, pair.max_tokens, pair.dtype, lambda stage: typer.echo(f"doctor: {stage}", err=True))
    typer.echo(listed(check) if as_json else render(check))
    if not check.ships:
        raise typer.Exit(1 if check.wrong else NOT_WORTH_IT)


def _draft_of(pair: PairOptions) -> str:
    """The model or heads that the method drafts with; of a draft model that is not named the shipped one, as `serve`
    takes it. Raises InvalidArgument where there is none for the target, NotFound for one that is missing."""
    method = find_method(pair.drafter)
    if not method.needs_model:
        return ""
    draft = pair.draft or ("" if method.needs_hidden_states else shipped_draft_for(pair.target))
    if not draft:
        raise InvalidArgument(
            f"the drafter {pair.drafter} needs a model: name one for {pair.target} with --draft, or try "
            "`--drafter suffix`, which needs none."
        )
    if not method.needs_hidden_states:  # the folder of heads may have no config.json
        check_folder(draft)
    return draft
