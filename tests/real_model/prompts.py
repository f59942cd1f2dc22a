"""What the real model is asked: a dozen prompts of our own, or Spec-Bench's and HumanEval's from a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from slipstream.tokenizer.vocabulary import load_tokenizer

OWN = (
    "What is the capital of France, and what is it known for?",
    "Write a short letter to a neighbour who plays loud music at night. Be polite.",
    "Write a Python function `merge(one, other)` that merges two sorted lists into one sorted list.",
    "Mend this function and say what was wrong:\n```python\ndef mean(values):\n    total = 0\n"
    "    for value in values:\n        total = value\n    return total / len(values)\n```",
    "A train leaves at 14:35 and arrives at 17:10. It stops for 12 minutes on the way. How long does it move?",
    "Tom has 3 boxes with 12 pencils each and gives away 17 pencils. How many has he left? Think step by step.",
    "Translate into German: The weather was fine, so we walked along the river until it was dark.",
    "Translate into French: 'Where can I buy a ticket for the museum?'",
    "Summarise in one sentence: The town council met on Monday. It decided to close the old bridge for repairs, which "
    "will take two years and cost four million. Drivers will use the bridge in the north. Shops in the old town fear "
    "that they will lose customers; the mayor promised them a bus that goes every ten minutes.",
    "List five facts about the moon, one a line, numbered.",
    "Answer as JSON with the keys name, colour and price: a red bicycle for 250 euros.",
    "Repeat this line five times: the quick brown fox jumps over the lazy dog.",
)
"""Chat, code, mathematics, translation, summary, lists, JSON and repetition."""
FOLDER_VARIABLE = "SPEC_BENCH"
FILES = ("spec_bench.jsonl", "humaneval_prompts.jsonl")


def asked(count: int) -> list[str]:
    """`count` prompts spread over the files of the folder that SPEC_BENCH names; `OWN` where it names none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return list(OWN)
    found = [turn for name in FILES for turn in first_turns(Path(folder) / name)]
    return found[:: max(1, len(found) // count)][:count]


def first_turns(file: Path) -> list[str]:
    """The first turn of each conversation of a file of JSON lines."""
    return [json.loads(line)["turns"][0] for line in file.read_text("utf-8").splitlines() if line]


def written(prompt: str) -> str:
    """The prompt as the model's own chat template writes it."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = (("system", system), ("user", prompt))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def encoded(folder: Path, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of the prompts in the chat template."""
    tokenizer = load_tokenizer(str(folder))
    return [tokenizer.encode(written(prompt), add_special_tokens=False).ids for prompt in prompts]
