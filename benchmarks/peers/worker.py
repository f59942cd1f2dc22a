"""What runs in a peer's own interpreter: a model that answers lines of prompts with tokens and seconds.

usage: python worker.py transformers plain|assisted|tuned|lookup TARGET DRAFT THREADS DTYPE
       python worker.py openvino plain|draft|lookup TARGET DRAFT THREADS DTYPE    (folders in OpenVINO's format)

Prints `ready`; then, for each line {"prompts": [[TOKEN, ...], ...], "tokens": N} on stdin, one line
{"seconds": S, "outputs": [[TOKEN, ...], ...]}, with "decoding_s", from the first token on, where there was one prompt.
Greedy, and always N tokens, unless the line has a "temperature" or says that a text "ends" where the model ends it. It
imports nothing of this repository: the other interpreters do not have what that needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Tokens = list[list[int]]
Generate = Callable[["Asked"], "Given"]


class Asked:
    """A line from stdin."""

    def __init__(self, line: str) -> None:
        asked = json.loads(line)
        self.prompts: Tokens = asked["prompts"]
        self.tokens: int = asked["tokens"]
        self.temperature: float = asked.get("temperature", 0.0)
        self.ends: bool = asked.get("ends", False)


class Given:
    """Outputs, and the clock at the first token of a lone prompt where the library tells it."""

    def __init__(self, outputs: Tokens, first: float | None = None) -> None:
        self.outputs, self.first = outputs, first


ASSISTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "assisted": {},
    "tuned": {
        "num_assistant_tokens": 4,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0,
    },
    "lookup": {"prompt_lookup_num_tokens": 4},
}


class FirstToken:
    """A streamer that notes when the first token came; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, tokens: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def up_to_end(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def with_transformers(method: str, target: str, draft: str, threads: int, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval().to(place)
    end = model.generation_config.eos_token_id
    model.generation_config.pad_token_id = 0
    options = dict(ASSISTED[method])
    if method in ("assisted", "tuned"):
        assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=getattr(torch, dtype)).eval().to(place)
        assistant.generation_config.eos_token_id = None
        assistant.generation_config.pad_token_id = 0
        for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
            if name in options:
                setattr(assistant.generation_config, name, options.pop(name))
        options["assistant_model"] = assistant

    def some(prompts: Tokens, asked: Asked) -> Given:
        """Prompts of a batch are filled up on the left."""
        longest, stop = max(map(len, prompts)), end if asked.ends else None
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=place)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=place)
        model.generation_config.eos_token_id = stop
        sampling = {"do_sample": True, "temperature": asked.temperature, "top_k": 0} if asked.temperature else {}
        watch = FirstToken() if len(prompts) == 1 else None
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=asked.tokens,
                min_new_tokens=0 if asked.ends else asked.tokens,
                streamer=watch,
                **({"do_sample": False} | sampling | options),
            )
        outputs = [up_to_end(row[longest : longest + asked.tokens].tolist(), stop) for row in out]
        return Given(outputs, watch.at if watch else None)

    def generate(asked: Asked) -> Given:
        if method == "plain":
            return some(asked.prompts, asked)
        parts = [some([prompt], asked) for prompt in asked.prompts]  # one at a time is all that these methods take
        return Given([part.outputs[0] for part in parts], parts[0].first if len(parts) == 1 else None)

    return generate


def with_openvino(method: str, target: str, draft: str, threads: int, dtype: str) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}

    def scheduler() -> Any:
        settings = genai.SchedulerConfig()
        settings.cache_size = 1  # GB
        settings.enable_prefix_caching = False
        return settings

    extra = {"draft_model": genai.draft_model(draft, "CPU", **properties)} if method == "draft" else {}
    extra |= {"prompt_lookup": True} if method == "lookup" else {}
    pipeline = genai.ContinuousBatchingPipeline(target, scheduler(), "CPU", properties | extra)

    def generate(asked: Asked) -> Given:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = asked.tokens, not asked.ends
        config.do_sample = asked.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = asked.temperature, 1.0
        if asked.ends:
            config.set_eos_token_id(pipeline.get_config().eos_token_id)
        if method != "plain":
            config.num_assistant_tokens = 4
        if method == "lookup":
            config.max_ngram_size = 3
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in asked.prompts]
        results = pipeline.generate(ids, [config] * len(asked.prompts))
        return Given([list(result.m_generation_ids[0]) for result in results])

    return generate


def main(library: str, *words: str) -> None:
    method, target, draft, threads, dtype = words
    made = {"transformers": with_transformers, "openvino": with_openvino}[library]
    generate = made(method, target, draft, int(threads), dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        given = generate(Asked(line))
        ended = time.perf_counter()
        told: dict[str, Any] = {"seconds": ended - began, "outputs": given.outputs}
        if given.first is not None:
            told["decoding_s"] = ended - given.first
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main(*sys.argv[1:])
