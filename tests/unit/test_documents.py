"""What the documents say is tested is tested: the names in them are names of tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {path.stem: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
TESTS = {name for text in FILES.values() for name in re.findall(r"def (test_\w+)\(", text)}


@pytest.mark.parametrize("document", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_a_document_names_is_there(document: str) -> None:
    named = set(re.findall(r"\btest_\w+", (ROOT / document).read_text("utf-8")))
    assert len(named) > 20
    assert not {name for name in named if name not in TESTS and name not in FILES}
