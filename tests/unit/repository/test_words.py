"""The product's words: docstrings name their subject first, and processes send, return and report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = (
    "protos",
    "slipstream",
    "gateway",
    "drafter_svc",
    "verifier_svc",
    "training",
    "measurement",
    "capacity",
    "tools",
    "examples",
    "k8s",
)
SOURCES = {".py", ".proto", ".lua", ".c", ".h", ".js", ".html", ".yaml", ".tpl", ".sh", ".go", ".rs", ".java"}
GENERATED = ROOT / "slipstream" / "v1"
OPENING = re.compile(r'^ *r?"""(?:What|How|Of|Whom?|The same)\b', re.MULTILINE)
PRIVATE = re.compile(r"\b(?:[Tt](?:ell(?:s|ing)?|old)|[Hh]ear(?:s|d|ing)?|[Nn]obody|[Ww]hom)\b")
LITERAL = {"measurement/pairs/check.py": "a friend whom you have not seen"}
"""Words that are meant as they stand, by file: a prompt about people."""
FILES = {
    str(path.relative_to(ROOT)): path
    for top in PRODUCT
    for path in sorted((ROOT / top).rglob("*"))
    if path.suffix in SOURCES and GENERATED not in path.parents and "node_modules" not in path.parts
}


def faults(text: str, literal: str = "") -> list[str]:
    """Lines with an opening or a word that the product does not use."""
    text = text.replace(literal, "") if literal else text
    found = (match.end() for pattern in (OPENING, PRIVATE) for match in pattern.finditer(text))
    return [text[text.rfind("\n", 0, end) + 1 :].partition("\n")[0].strip() for end in found]


def test_the_product_has_the_words_of_the_field() -> None:
    assert len(FILES) > 500
    found = {name: faults(path.read_text("utf-8"), LITERAL.get(name, "")) for name, path in FILES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_exception_is_in_use() -> None:
    assert [name for name in LITERAL if not faults(FILES[name].read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "sentence",
    [
        '"""What a step takes."""',
        'class A:\n    """How the roles share a machine."""',
        'tokens: int\n    """Of its sessions."""',
        'def f() -> None:\n    """Who asks."""',
        '    """The same, as templates know it."""',
        "# the drafter is told the new root",
        "// Where to resume to hear what is new.",
        'dropped["nobody"] += 1',
        "heard = Once()",
        "-- sessions for whom a verifier drafts",
        '"Tells of crashes."',
    ],
)
def test_a_planted_fault_is_found(sentence: str) -> None:
    assert len(faults(f"import os\n{sentence}\n")) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        '"""Whether the session ends."""',
        '"""Offset of the first token."""',
        '"""However long the text is, a step ends."""',
        'text = """What the model wrote"""',
        '    "slipstream_drafter_told_tokens_total": "slipstream_drafter_sent_candidates_total",',
        "# What the drafter sends is bounded.",
        "satellite, intelligence",
    ],
)
def test_other_sentences_pass(sentence: str) -> None:
    assert faults(f"import os\n{sentence}\n") == []
