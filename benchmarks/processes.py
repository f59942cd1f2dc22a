"""What the benchmarks know of processes: their CPU time, and a fleet that serves while a block runs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.engine.cpu_cores import available_cores
from slipstream.proposers.registry import METHODS
from slipstream.serving.fleet import Fleet
from slipstream.serving.options import FleetOptions
from slipstream.serving.placement import place
from slipstream.serving.role import Role

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
ANYWHERE = "127.0.0.1:0"
EMULATED_DRAFTER = {"DRAFTER_SHARPNESS": "1", "DRAFTER_KV_TOKENS": str(1 << 20)}
"""An emulated drafter reports calibrated probabilities; KV without a model costs nothing."""
INFLATED = ROOT / ".cache" / "target-300m"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of CPU a process has used, in the kernel and outside it, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def cpu_of_children_s(pid: int) -> float:
    """The same of all children of a process, and of theirs."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for file in children for child in file.read_text().split()]
    return sum(cpu_s(child) + cpu_of_children_s(child) for child in found)


def inflate() -> None:
    """Makes INFLATED, the shipped target at the price of 300 M parameters; does nothing if it is there."""
    inflated("300M")


def inflated(parameters: str) -> Path:
    """The folder of the shipped target at the price of so many parameters, made if it is not there."""
    folder = ROOT / ".cache" / f"target-{parameters.lower()}"
    command = [sys.executable, "-m", "slipstream", "inflate", str(MODELS / "target"), str(folder)]
    subprocess.run([*command, "--parameters", parameters], check=True)
    return folder


def gpu() -> str:
    """The name of the first GPU of this machine, empty without one."""
    import torch  # which most benchmarks leave to other processes

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def cpu() -> str:
    """This machine's CPU, with the widest of the instructions that products here are made of."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    known = {"avx512_bf16": "AVX512-BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((word for flag, word in known.items() if flag in flags), platform.machine())
    family = "".join(
        f", {word} {fields[name]}" for name, word in (("cpu family", "family"), ("model", "model")) if name in fields
    )
    return f"{fields.get('model name', 'unknown CPU')}{family}, {widest}"


@asynccontextmanager
async def serving(
    target: str, draft: str, dtype: str = "auto", kinds: Sequence[str] = ("model",), engine: str = "embedded"
) -> AsyncIterator[str]:
    """The gateway's address while verifier, drafter and gateway run as processes of their own."""
    drafters = {kind: draft if METHODS[kind].needs_model else "" for kind in kinds}
    threads = place(available_cores(), kinds, False, 0, True).threads
    fleet = Fleet(target, drafters, dtype, threads, FleetOptions(engine=engine))
    try:
        yield await fleet.start("127.0.0.1:0", "memory")
    finally:
        await fleet.stop()


async def started(stack: AsyncExitStack, module: str, settings: Mapping[str, str]) -> tuple[Role, str]:
    """One role as a process of its own, which ends with the stack, and the address it serves at."""
    role = Role(module, settings)
    stack.push_async_callback(role.end)
    return role, await role.start()


@dataclass(frozen=True, slots=True)
class Far:
    """A system whose drafter stands at the end of a long line. Models as `slipstream.engine.factory` names them."""

    target: str
    draft: str
    delay_ms: float
    """One way."""
    verifier: str = "verifier_svc"
    """The module that runs the verifier."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of any role: VERIFIER_*, DRAFTER_*, GATEWAY_*."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The gateway's address."""
        here = {"VERIFIER_LISTEN": ANYWHERE, "DRAFTER_LISTEN": ANYWHERE, "GATEWAY_LISTEN": ANYWHERE} | dict(
            self.settings
        )
        async with AsyncExitStack() as stack:

            async def start(module: str, prefix: str, more: Mapping[str, str]) -> str:
                own = {name: value for name, value in here.items() if name.startswith(prefix)}
                _, address = await started(stack, module, own | dict(more))
                return address

            drafter = await start("drafter_svc", "DRAFTER_", {"DRAFTER_MODEL": self.draft})
            line = {"LINE_TO": drafter, "LINE_DELAY_MS": str(self.delay_ms)}
            far = await start("benchmarks.delay_line", "LINE_", line)
            tokenizer = str(MODELS / "target") if self.target.startswith("emulated:") else self.target
            knows = {
                "GATEWAY_VERIFIERS": await start(self.verifier, "VERIFIER_", {"VERIFIER_MODEL": self.target}),
                "GATEWAY_DRAFTERS": f"model={far}",
                "GATEWAY_TRUSTED_DRAFTERS": "model",
                "GATEWAY_TOKENIZER": tokenizer,
            }
            yield await start("gateway", "GATEWAY_", knows)
