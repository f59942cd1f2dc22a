"""The systems that answer chat prompts of a target without the shipped draft model: how each is started.

Each drafts, if it does, from the prompt and its own output; ours also with the draft model or the head that the project
ships for the target, where there is one. llama.cpp has the weights in fp32 and in bf16, the checkpoint's own type:
there it reads half the bytes and rounds activations to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from benchmarks.peers import environments
from benchmarks.peers.systems import Setting, Start, System, asking, in_worker, llama_cpp, serving, vllm
from slipstream.serving.default_drafters import shipped_draft_for
from slipstream.tokenizer.vocabulary import SHIPPED

SIMPLE = ("--spec-type", "ngram-simple")
MOD = ("--spec-type", "ngram-mod")
EXPECTED = "transformers"
OURS = "Slipstream"
HEADS = {"smollm2": "smollm2-eagle"}
"""Trained heads by target, in the folder of shipped models; none drafts by default."""


class SharedFleet:
    """One fleet, started when it is first needed, for every way of asking it: it has the weights once."""

    def __init__(self, drafting: Mapping[str, str]) -> None:
        """Methods with their models' folders, empty for none."""
        self._drafting = drafting
        self._address = ""

    async def __call__(self, drafters: list[str] | None, stack: AsyncExitStack, setting: Setting) -> System:
        """With these drafters; an empty list: those that the server chooses, None: none."""
        if not self._address:
            self._address = await serving(stack, setting, self._drafting)
        return asking(self._address, setting, drafters)


def chat_systems(target: str) -> dict[str, Start]:
    """By name, plain ones first. Each start is given one stack."""
    draft = shipped_draft_for(str(environments.checkpoint(target)))
    default = ({"model": draft} if draft else {}) | {"suffix": ""}
    drafting = default | ({"eagle": str(SHIPPED / HEADS[target])} if target in HEADS else {})
    fleet = SharedFleet(drafting)
    systems: dict[str, Start] = {
        EXPECTED: partial(in_worker, "transformers", "plain"),
        "llama.cpp": partial(llama_cpp, ()),
        "llama.cpp, bf16": partial(llama_cpp, (), kind="bf16"),
        "OpenVINO GenAI": partial(in_worker, "openvino", "plain"),
        "vLLM": partial(vllm, "plain"),
        f"{OURS}, plain": partial(fleet, None),
        "transformers, prompt lookup": partial(in_worker, "transformers", "lookup"),
        "llama.cpp, ngram-simple": partial(llama_cpp, SIMPLE),
        "llama.cpp, ngram-mod": partial(llama_cpp, MOD),
        "llama.cpp, bf16, ngram-simple": partial(llama_cpp, SIMPLE, kind="bf16"),
        "llama.cpp, bf16, ngram-mod": partial(llama_cpp, MOD, kind="bf16"),
        "OpenVINO GenAI, prompt lookup": partial(in_worker, "openvino", "lookup"),
        "vLLM, n-gram": partial(vllm, "ngram"),
    }
    others = drafting if len(default) > 1 else set(drafting) - set(default)
    systems |= {f"{OURS}, {method}": partial(fleet, [method]) for method in others}
    return systems | {OURS: partial(fleet, list(default))}


PLAIN = {EXPECTED, "llama.cpp", "llama.cpp, bf16", "OpenVINO GenAI", "vLLM", f"{OURS}, plain"}
