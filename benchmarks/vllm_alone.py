"""What `benchmarks.vllm_engine` runs in vLLM's interpreter: vLLM by itself, or the parts of our executor's step.

usage: python -m benchmarks.vllm_alone plain|ngram|steps MODEL [DTYPE]     (default: float32)

`plain` and `ngram` print a line when they are ready, then for each line {"prompts": [[TOKEN, ...], ...],
"tokens": N} on stdin a line {"seconds": S, "outputs": [[TOKEN, ...], ...]} and a line `took S`. The line on stdin may
have a "temperature", and say that a text "ends" where the model ends it. `steps` prints medians in milliseconds by
sequences of a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

KV_BYTES = 1 << 29
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MEASURE_S = 10.0


def serve(method: str, model: str, dtype: str = "float32") -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,
        speculative_config=NGRAM if method == "ngram" else None,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        sampling = SamplingParams(
            temperature=wanted.get("temperature", 0.0),
            max_tokens=wanted["tokens"],
            ignore_eos=not wanted.get("ends"),
            detokenize=False,
        )
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in wanted["prompts"]]
        began = time.perf_counter()
        found = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "outputs": [list(each.outputs[0].token_ids) for each in found]}))
        print(f"took {seconds}", flush=True)


def _timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            times.append(time.perf_counter() - began)

    return timed


def watch(wrapper: Any) -> None:
    """In the worker: notes how long the parts of its steps take."""
    worker = wrapper.worker
    worker.times = {"execute": [], "sample": [], "decide": []}
    worker.execute_model = _timed(worker.execute_model, worker.times["execute"])
    worker.sample_tokens = _timed(worker.sample_tokens, worker.times["sample"])
    sampler = worker.model_runner.step_sampler
    sampler.decide = _timed(sampler.decide, worker.times["decide"])


def take(wrapper: Any) -> dict[str, list[float]]:
    """In the worker: what it noted, which is then forgotten."""
    taken = {name: list(times) for name, times in wrapper.worker.times.items()}
    for times in wrapper.worker.times.values():
        times.clear()
    return taken


def steps(model: str) -> None:
    from slipstream.engine.models.checkpoint import describe_checkpoint
    from verifier_svc.config import VerifierConfig
    from verifier_svc.estimators.cost_curve import CostCurve
    from verifier_svc.execution.vllm.executor import VLLMExecutor

    config = VerifierConfig(model=model, engine="vllm", dtype="float32", kv_tokens=16_384)
    executor = VLLMExecutor(config, describe_checkpoint(model))
    ask = executor.core._executor.collective_rpc
    ask(watch)
    build, whole = list[float](), list[float]()
    sent, core = executor.requests, executor.core
    sent.schedule = _timed(sent.schedule, build)  # type: ignore[method-assign]
    core.run = _timed(core.run, whole)  # type: ignore[method-assign]
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    run = executor._run_segments

    def noted(segments: Any) -> None:
        run(segments)
        inside = {name: sum(times) for name, times in ask(take)[0].items()}
        parts = {"build": build[-1], "worker": inside["execute"] + inside["sample"], "sampler": inside["decide"]}
        found[len(segments)].append(parts | {"rpc": whole[-1] - parts["worker"], "step": build[-1] + whole[-1]})

    executor._run_segments = noted  # type: ignore[method-assign]
    try:
        executor.measure_costs(CostCurve(), 64, MEASURE_S)
    finally:
        executor.close()
    rows = [
        {"sequences": size, "steps": len(parts)}
        | {f"{name}_ms": 1e3 * statistics.median(each[name] for each in parts) for name in parts[0]}
        for size, parts in sorted(found.items())
    ]
    print(f"rows {json.dumps(rows)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(sys.argv[2])
    else:
        serve(*sys.argv[1:4])
