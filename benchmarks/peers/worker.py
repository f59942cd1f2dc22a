"""What runs in a peer's own interpreter: a model that answers lines of prompts with tokens and seconds.

usage: python worker.py transformers plain|assisted|tuned|lookup TARGET DRAFT THREADS DTYPE
       python worker.py openvino plain|draft TARGET DRAFT THREADS DTYPE    (folders in OpenVINO's format)

Prints `ready`; then, for each line {"prompts": [[TOKEN, ...], ...], "tokens": N} on stdin, one line
{"seconds": S, "outputs": [[TOKEN, ...], ...]}. Greedy, and always N tokens. It imports nothing of this repository: the
other interpreters do not have what that needs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]
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


def with_transformers(method: str, target: str, draft: str, threads: int, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval().to(place)
    model.generation_config.eos_token_id = None
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

    def some(prompts: Tokens, count: int) -> Tokens:
        ids = torch.tensor(prompts, device=place)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                **options,
            )
        return [row[len(prompt) : len(prompt) + count].tolist() for row, prompt in zip(out, prompts, strict=True)]

    def generate(prompts: Tokens, count: int) -> Tokens:
        if method == "plain":  # prompts of one length make a batch; the others take one request at a time
            return some(prompts, count)
        return [output for prompt in prompts for output in some([prompt], count)]

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
    pipeline = genai.ContinuousBatchingPipeline(target, scheduler(), "CPU", properties | extra)

    def generate(prompts: Tokens, count: int) -> Tokens:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        if method == "draft":
            config.num_assistant_tokens = 4
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


def main(library: str, *words: str) -> None:
    method, target, draft, threads, dtype = words
    made = {"transformers": with_transformers, "openvino": with_openvino}[library]
    generate = made(method, target, draft, int(threads), dtype)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        outputs = generate(asked["prompts"], asked["tokens"])
        print(json.dumps({"seconds": time.perf_counter() - began, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main(*sys.argv[1:])
