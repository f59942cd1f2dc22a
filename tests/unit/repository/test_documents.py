"""What the documents say is tested is tested: the names in them are names of tests. And every setting is told of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.config_help import settings
from tools import models
from tools.settings import CONFIGS, document

ROOT = Path(__file__).resolve().parents[3]
DOCS = (ROOT / "docs").glob("*.md")
PACKAGES = ("gateway", "slipstream", "verifier_svc", "drafter_svc")
FOLDERS = {folder.name for folder in ROOT.iterdir() if folder.is_dir()}
PATHS = list((ROOT / "tests").rglob("test_*.py"))
FILES = {path.stem for path in PATHS}
TESTS = {name for path in PATHS for name in re.findall(r"def (test_\w+)\(", path.read_text("utf-8"))}


@pytest.mark.parametrize("name", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_a_document_names_is_there(name: str) -> None:
    named = set(re.findall(r"\btest_\w+", (ROOT / name).read_text("utf-8")))
    assert len(named) > 20
    assert not {each for each in named if each not in TESTS and each not in FILES}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(p.name for p in DOCS)])
def test_every_file_that_a_document_names_is_there(name: str) -> None:
    """Of paths from the repository's root; others begin at the package that the sentence is about."""
    document = ROOT / name if (ROOT / name).exists() else ROOT / "docs" / name
    paths = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|toml|yaml|json|h))`", document.read_text("utf-8")))
    assert [path for path in paths if path.split("/")[0] in FOLDERS and not (ROOT / path).exists()] == []


def test_every_default_stands_in_the_file_that_the_page_names() -> None:
    page = (ROOT / "docs" / "defaults.md").read_text("utf-8")
    rows = re.findall(r"`([a-z]\w*(?:/\w+)*\.py)`: ((?:`[A-Z_]+`(?:, | and )?)+)", page)
    sources = [path for each in PACKAGES for path in (ROOT / each).rglob("*.py")]
    assert len(rows) > 30
    for name, constants in rows:
        files = [path.read_text("utf-8") for path in sources if f"/{path.as_posix()}".endswith(f"/{name}")]
        for constant in re.findall(r"`([A-Z_]+)`", constants):
            assert any(re.search(rf"\b{constant}\b", text) for text in files), f"{name}: {constant}"


def test_the_readme_counts_the_files_and_lines_of_its_reading_list() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    told = re.search(r"in these (\d+) files, ([\d,]+) lines", readme)
    assert told is not None
    files: list[Path] = []
    for row in re.findall(r"^\|.*\|$", readme[told.end() :].partition("\n[")[0], re.MULTILINE)[2:]:
        idea, names = row.strip("| ").split(" | ")
        (folder,) = re.findall(r"`([\w/]+/)`", idea)
        files += [ROOT / folder / f"{name}.py" for name in re.findall(r"`([\w/]+)`", names)]
    assert len(files) == int(told[1])
    lines = sum(len(each.read_text("utf-8").splitlines()) for each in files)
    assert abs(lines - int(told[2].replace(",", ""))) <= 0.03 * lines, f"{lines} lines"


def test_every_setting_is_documented_as_in_its_dataclass() -> None:
    assert [each.variable for config in CONFIGS.values() for each in settings(*config) if not each.meaning] == []
    told = (ROOT / "docs" / "settings.md").read_text("utf-8")
    assert told == document(), "run `python -m tools.settings > docs/settings.md`"


def test_the_page_of_models_equals_what_the_code_generates() -> None:
    """Which families there are depends on transformers' version, which the page names."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert models.document() + "\n" == page
