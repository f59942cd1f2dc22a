"""`make test-cluster` fails where it cannot run, and names all that is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.images import MODULES, NoSuchImage, command
from tests.cluster.programs import ASSETS, CONTROL_PLANE, TELEMETRY, missing

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("assets", [None, "empty"])
def test_without_a_control_plane_the_command_fails_and_names_what_is_missing(
    assets: str | None, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != ASSETS}
    if assets is not None:
        environment[ASSETS] = str(tmp_path)
    words = [sys.executable, "-m", "tests.cluster"]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert all(name in done.stderr for name in (ASSETS, *CONTROL_PLANE, *TELEMETRY))


def test_programs_that_are_installed_are_not_reported_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CONTROL_PLANE, *TELEMETRY):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv(ASSETS, str(tmp_path))
    assert not any(str(tmp_path) in sentence for sentence in missing())
    (tmp_path / "jaeger").chmod(0o644)
    assert f"{tmp_path} ({ASSETS}) has no jaeger." in missing()


def test_tests_of_the_cluster_are_collected_by_their_command_alone() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--confcutdir=tests/cluster", "tests/cluster"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_every_image_of_ours_in_the_manifests_has_its_program() -> None:
    """A pod whose image has none would never be ready, and its test would wait for it to the end."""
    folders = [ROOT / "k8s" / name for name in ("base", "components", "overlays")]
    texts = [path.read_text("utf-8") for folder in folders for path in folder.rglob("*.yaml")]
    images = {image for text in texts for image in re.findall(r"\bimage: (slipstream/[\w-]+)", text)}
    assert images == {f"slipstream/{name}" for name in MODULES}
    for image in images:
        assert command(f"{image}:0.1.0")[1:] == ["-m", MODULES[image.removeprefix("slipstream/")]]
    with pytest.raises(NoSuchImage):
        command("slipstream/chooser:0.1.0")
