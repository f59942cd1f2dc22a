"""The words of product and tests: docstrings name their subject first, processes send, return and report, and names of
tests say so too."""

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
TEST = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
PRIVATE_NAME = re.compile(
    r"^test_(?:what|whose|why)_|_gone_on_(?:with|from)(?=_|$)|"
    r"_(?:told|tells?|hears?|heard|says?|said|knows?|wants?|believe[sd]?|notice[sd]?|knocks?|liar|"
    r"nobodys?|anybodys?|somebodys?|everybodys?|whoever|whom?)(?=_|$)"
)
"""What a name of a test leaves open: its subject, or what a process does."""
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


def private_names(text: str) -> list[str]:
    """Names of tests that an engineer of the field has to guess at."""
    return [name for name in TEST.findall(text) if PRIVATE_NAME.search(name)]


def test_the_product_has_the_words_of_the_field() -> None:
    assert len(FILES) > 500
    found = {name: faults(path.read_text("utf-8"), LITERAL.get(name, "")) for name, path in FILES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_names_of_tests_have_the_words_of_the_field() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
    assert sum(len(TEST.findall(text)) for text in texts.values()) > 2000
    found = {name: private_names(text) for name, text in texts.items()}
    assert {name: names for name, names in found.items() if names} == {}


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


@pytest.mark.parametrize(
    "name",
    [
        "test_a_worker_is_told_its_device",
        "test_followers_hear_of_a_rollback",
        "test_a_flood_harms_nobody",
        "test_what_is_lost_is_written_again",
        "test_a_liar_gets_no_session",
        "test_the_fleet_is_open_to_those_who",
        "test_the_last_message_is_gone_on_with",
    ],
)
def test_a_planted_name_is_found(name: str) -> None:
    assert private_names(f"class Tests:\n    async def {name}(\n        self) -> None: ...\n") == [name]


@pytest.mark.parametrize(
    "name",
    [
        "test_a_known_file_is_read_whole",
        "test_a_request_gets_what_its_limit_leaves",
        "test_sayings_of_tellers",
        "helper_that_was_told",
    ],
)
def test_another_name_passes(name: str) -> None:
    assert private_names(f"def {name}() -> None: ...\n") == []
