"""`python -m tools.wheel FOLDER`: builds the wheel from a copy of the sources, and prints where it lies.

setuptools builds beside its sources: two builds of one checkout overwrite each other's files, and a build takes along
what an earlier one left. SLIPSTREAM_COMPILE=1 compiles modules (setup.py).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("slipstream", "gateway", "drafter_svc", "verifier_svc", "capacity", "measurement", "training", "models")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILT = shutil.ignore_patterns("__pycache__", "*.so")
"""Files among the sources of a checkout that are not sources."""


def build(folder: Path, *options: str) -> Path:
    """Builds into a folder, with these options of `pip wheel`. Raises CalledProcessError where pip fails."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps"]
    with TemporaryDirectory() as copied, TemporaryDirectory() as built:
        for name in SOURCES:
            shutil.copytree(ROOT / name, Path(copied) / name, symlinks=True, ignore=BUILT)
        for name in FILES:
            shutil.copy(ROOT / name, copied)
        subprocess.run([*pip, *options, "--wheel-dir", built, copied], check=True)
        [wheel] = Path(built).iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
