"""Chat prompts of published sets, as tokens of a target with a chat template of its own.

A set is a `.jsonl` file with one object a line: `turns`, of which the first is asked, and `category`, without which it
is the file's name. Spec-Bench's eight kinds of MT-bench's questions are one, `multi-turn`, as in its authors' tables.
Sets are named on the command line and never part of the project.

usage: python -m benchmarks.peers.chats FOLDER TARGET COUNT > prompts.jsonl    (for `slipstream doctor --prompts`)
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgument

MULTI_TURN = "multi-turn"
OF_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
MOST_TOKENS = 1024
"""Of a prompt; longer ones are left out. With the answer it fits every system's cache."""


@dataclass(frozen=True, slots=True)
class Chat:
    category: str
    token_ids: list[int]


def read(folder: Path) -> dict[str, list[str]]:
    """First turns by category, in the order of the files. Raises InvalidArgument for a folder without any, or for a
    line without turns."""
    found = defaultdict[str, list[str]](list)
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            asked = json.loads(line)
            if not isinstance(asked, dict) or not asked.get("turns"):
                raise InvalidArgument(f"{file}, line {number}: an object with `turns` is needed.")
            category = asked.get("category", file.stem.removesuffix("_prompts"))
            found[MULTI_TURN if category in OF_MT_BENCH else category].append(asked["turns"][0])
    if not found:
        raise InvalidArgument(f"{folder} has no .jsonl file with prompts.")
    return dict(found)


def spread(some: Sequence[str], count: int) -> Iterator[str]:
    """All of them, so that the first `count` lie evenly over the whole set."""
    step = max(1, len(some) // count)
    first = range(step // 2, len(some), step)
    yield from (some[at] for at in first)
    yield from (some[at] for at in range(len(some)) if at not in first)


def chats(texts: Mapping[str, Sequence[str]], tokenizer: Any, of_each: int) -> list[Chat]:
    """So many of each category, one category after the other in turn, so that neighbours differ. `tokenizer` is the
    library's, with the target's chat template."""
    chosen = [list(_short(name, some, tokenizer, of_each)) for name, some in texts.items()]
    return [column[place] for place in range(of_each) for column in chosen if place < len(column)]


def _short(category: str, texts: Sequence[str], tokenizer: Any, count: int) -> Iterator[Chat]:
    for text in spread(texts, count):
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        if len(ids) <= MOST_TOKENS:
            yield Chat(category, list(ids))
            count -= 1
        if count == 0:
            return


def main(folder: str, target: str, count: str) -> None:
    """Prints the chosen prompts, a JSON object a line, with their categories as slices of the workload."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    for chat in chats(read(Path(folder)), tokenizer, int(count)):
        print(json.dumps({"prompt": tokenizer.decode(chat.token_ids), "workload": chat.category}))


if __name__ == "__main__":
    main(*sys.argv[1:])
