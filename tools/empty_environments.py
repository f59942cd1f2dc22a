"""`python -m tools.empty_environments`: roles that run without torch, in virtual environments that hold nothing else.

Builds the wheel, installs it with each set of extras into a new environment, starts a gateway and a lookup drafter from
theirs, and connects to both with the client's command. Prints the size of each; ends with status 1 where torch came
along or something does not run.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.wheel import build

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"client": "", "lookup": "[lookup]", "gateway": "[gateway]"}
"""Extras of the package that each role installs."""
START_S = 120.0


def run(*command: str | Path) -> str:
    """Standard output. Raises CalledProcessError, with what the command printed shown before."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def install(folder: Path, wheel: Path, extras: str) -> Path:
    """A new environment's folder of commands."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check", f"{wheel}{extras}")
    return folder / "bin"


def megabytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*")) // 1_000_000


@contextmanager
def running(module: str, commands: Path, listens_by: str, **settings: str) -> Iterator[str]:
    """A role out of this environment, at a free port; yields its address once it listens there. `listens_by` is the
    setting of the address. Raises RuntimeError if the role ends instead, or does not listen in time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | settings | {listens_by: address}
    command = [str(commands / "python"), "-m", module]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not listens(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module} does not listen at {address}; status {process.poll()}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(START_S)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def main() -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build(folder / "wheel")
        commands = {role: install(folder / role, wheel, extras) for role, extras in EXTRAS.items()}
        for role, extras in EXTRAS.items():
            print(f"{role:8} pip install slipstream-serve{extras:10} {megabytes(folder / role):5} MB")
            if list((folder / role).rglob("site-packages/torch")):
                raise SystemExit(f"torch was installed for {role}")
        doctor = (commands["client"] / "slipstream", "doctor")
        with running("drafter_svc", commands["lookup"], "DRAFTER_LISTEN", DRAFTER_METHOD="suffix") as drafter:
            print(run(*doctor, "--worker", drafter).strip())
            settings = {
                "GATEWAY_TOKENIZER": str(ROOT / "models" / "target"),
                "GATEWAY_VERIFIERS": "127.0.0.1:1",
                "GATEWAY_DRAFTERS": f"suffix={drafter}",
            }
            with running("gateway", commands["gateway"], "GATEWAY_LISTEN", **settings) as gateway:
                found = subprocess.run([*doctor, "--server", gateway], capture_output=True, text=True, check=False)
                if "NO_VERIFIER" not in found.stdout:  # the gateway's own answer: there is none here
                    raise SystemExit(f"the gateway did not answer: {found.stdout}{found.stderr}")
                print(f"ok    gateway {gateway}: answers, and has no verifier")


if __name__ == "__main__":
    main()
