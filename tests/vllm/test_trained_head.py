"""A head that `slipstream train eagle` exported drafts in vLLM what it drafts here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from slipstream.proposers.eagle_checkpoint import load_head
from slipstream.proposers.head_file import read_target
from tests.support.eagle_heads import save_easy_target
from training.request import TrainRequest
from training.run import TrainingRun, open_drafter
from training.target import Target
from training.texts import Sample, padded
from training.trained_drafter import UNKNOWN

DEPTH, TOKENS = 2, 48
PROMPTS = [[number * 3 % 199, number * 7 % 199, number * 11 % 199] for number in range(1, 17)]
GENERATE = f"""
import json, sys
from vllm import LLM, SamplingParams

target, head, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
speculation = {{"model": head, "method": "eagle3", "num_speculative_tokens": {DEPTH}}}
llm = LLM(target, dtype="float32", max_model_len=128, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True,
          disable_log_stats=False, speculative_config=speculation)
plan = SamplingParams(temperature=0.0, max_tokens={TOKENS}, ignore_eos=True, detokenize=False)
found = llm.generate([{{"prompt_token_ids": each}} for each in prompts], plan, use_tqdm=False)
metrics = {{each.name: each for each in llm.get_metrics()}}
accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
print("RESULT", json.dumps([[list(each.outputs[0].token_ids) for each in found], list(accepted)]))
"""


def trained(target: Path, out: Path) -> TrainRequest:
    prompts = out.with_name("prompts.jsonl")
    lines = [{"prompt": f"t{number % 199} t{number * 7 % 199}"} for number in range(400)]
    prompts.write_text("".join(json.dumps(line | {"workload": str(at)}) + "\n" for at, line in enumerate(lines)))
    request = TrainRequest(
        "eagle", str(target), str(out), data=str(prompts), steps=150, rows=8, window=48, depth=DEPTH, answers=320,
        answer_tokens=40, held_out_answers=16, evaluate_steps=50,
    )  # fmt: skip
    TrainingRun(request).run(resume=False)
    return request


def accepted_here(request: TrainRequest, texts: list[list[int]]) -> list[int]:
    """Accepted first choices by depth, behind the first token of each text, round by round."""
    drafter: Any = open_drafter(request, Target(request.target), torch.ones(199, dtype=torch.int64))
    drafter.module = load_head(request.out, read_target(request.target), torch.float32)
    batch = padded([Sample(prompt + text, 4, "") for prompt, text in zip(PROMPTS, texts, strict=True)])
    ranks = drafter.ranks(batch, Target(request.target).read(batch.tokens.tolist(), drafter.layers))
    accepted = [0] * DEPTH
    for row in ranks.permute(1, 2, 0).tolist():
        places = [place for place in row if place[0] != UNKNOWN]
        at = 0
        while at < len(places):
            right = next((depth for depth, rank in enumerate(places[at]) if rank != 0), DEPTH)
            for depth in range(right):
                accepted[depth] += 1
            at += 1 + right
    return accepted


def test_vllm_accepts_as_many_candidates_of_an_exported_head_as_this_engine(tmp_path: Path) -> None:
    target = save_easy_target(tmp_path / "target", hidden_size=128, num_hidden_layers=4)
    request = trained(target, tmp_path / "head")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}  # of our executor
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(target), request.out, json.dumps(PROMPTS)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    [line] = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")] or [""]
    assert line, done.stderr[-3000:]
    texts, accepted = json.loads(line.removeprefix("RESULT "))
    here = accepted_here(request, texts)
    assert accepted[0] > 50, "too few to compare"
    # The last round of a text may end in the midst of its candidates.
    assert all(abs(there - own) <= 3 for there, own in zip(accepted, here, strict=True)), (accepted, here)
