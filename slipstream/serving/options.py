"""Options of `slipstream serve`, as typer reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from slipstream.proposers.registry import METHODS
from slipstream.tokenizer.chat_template_source import SHIPPED

MODELS, DRAFTING, ADDRESSES, OBSERVATION = "Target", "Drafting", "Addresses and store", "Observation"
"""Groups of options in `--help`."""
EMBEDDED = "embedded"


@dataclass(frozen=True)
class ModelOptions:
    """Options of `serve` for its models and methods."""

    target: Annotated[
        str,
        typer.Option(
            help="Target model: a folder, a GGUF file or a hub id[@REVISION]. Default: the shipped one.",
            rich_help_panel=MODELS,
        ),
    ] = ""
    draft: Annotated[
        str,
        typer.Option(
            help="Draft model: a folder, a GGUF file or a hub id[@REVISION]. Default: the shipped one.",
            rich_help_panel=DRAFTING,
        ),
    ] = ""
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; repeat it for more. METHOD=FOLDER names its model or heads. `none`: plain "
            "decoding. Default: model, where a draft model fits the target, and suffix in the verifier.",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (the checkpoint's own, or float32 where this CPU would emulate it), float32, bfloat16, float16.",
            rich_help_panel=MODELS,
        ),
    ] = "auto"
    threads: Annotated[
        int,
        typer.Option(
            help="Threads of the verifier's model; 0: all cores, less one for drafter processes.",
            rich_help_panel=MODELS,
        ),
    ] = 0


@dataclass(frozen=True)
class FleetOptions:
    """Options of `serve` for its processes."""

    target_quantisation: Annotated[
        str, typer.Option(help="int8 or int4; changes the text.", rich_help_panel=MODELS)
    ] = ""
    draft_quantisation: Annotated[
        str, typer.Option(help="int8, int4 or int8-dynamic; never changes the text.", rich_help_panel=DRAFTING)
    ] = ""
    engine: Annotated[
        str, typer.Option(help="Executor of the target: embedded or vllm (`make setup-vllm`).", rich_help_panel=MODELS)
    ] = EMBEDDED
    draft_engine: Annotated[
        str,
        typer.Option(
            help="What runs the draft model: embedded, or vllm in a process of its own.", rich_help_panel=DRAFTING
        ),
    ] = EMBEDDED
    translate: Annotated[
        bool,
        typer.Option(
            "--translate",
            help="The draft model may have another tokenizer; translate its tokens.",
            rich_help_panel=DRAFTING,
        ),
    ] = False
    chat_template: Annotated[
        str,
        typer.Option(
            help=f"Chat template: a file (Jinja), or one of {', '.join(SHIPPED)}; default: the target's.",
            rich_help_panel=MODELS,
        ),
    ] = ""
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name by which requests may ask for the target; repeat it for more.", rich_help_panel=MODELS
        ),
    ] = None
    traces: Annotated[
        Path | None,
        typer.Option(help="Write traces to this folder, for `slipstream trace`.", rich_help_panel=OBSERVATION),
    ] = None
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics",
            help="Serve /metrics of every role, at the addresses in the ready line.",
            rich_help_panel=OBSERVATION,
        ),
    ] = False

    def methods_on_vllm(self, methods: Iterable[str]) -> set[str]:
        """Those that have a draft model, where vLLM runs it."""
        return {kind for kind in methods if self.draft_engine != EMBEDDED and METHODS[kind].compares_tokenizers}


@dataclass(frozen=True)
class AddressOptions:
    """Options of `serve` for its addresses and its session log."""

    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the gateway; port 0 picks a free one.", rich_help_panel=ADDRESSES)
    ] = "127.0.0.1:50051"
    http: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the HTTP API, OpenAI-compatible; port 0 picks a free one; `off`: none.",
            rich_help_panel=ADDRESSES,
        ),
    ] = "127.0.0.1:8000"
    store: Annotated[
        str, typer.Option(help="Session log: memory, or redis://HOST:PORT/DB.", rich_help_panel=ADDRESSES)
    ] = "memory"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the addresses as one JSON object.", rich_help_panel=ADDRESSES)
    ] = False
