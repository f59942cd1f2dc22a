"""Trials of a forward pass that passed on this machine: the same one is not run at each start.

A trial is the same where everything that decides its outcome is: the weights by content, their type, which pass, this
package's engine and kernels, torch and the model library, the processor's instructions, the device.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch
import transformers

from slipstream import user_cache
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.model_info import ModelInfo
from slipstream.engine.models.arithmetic import kernels_name

ENGINE = Path(__file__).parents[1]
KIND = "trials"


def trial_question(info: ModelInfo, device: torch.device, *, lean: bool) -> str:
    """Everything that decides what the trial finds."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return json.dumps(
        {
            "weights": info.revision,
            "dtype": info.dtype,
            "length": info.max_length,
            "lean": lean,
            "engine": _engine_digest(),
            "kernels": kernels_name() if find_kernels() is not None else "",
            "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
            "transformers": transformers.__version__,
            "device": place,
        }
    )


def report_of(question: str) -> str:
    """Returns the report of a trial that passed; empty if it failed, or was not run."""
    try:
        return user_cache.cache_file(KIND, question).read_text()
    except (OSError, ValueError):
        return ""


def keep_report(question: str, report: str) -> None:
    """Keeps the report of a trial that passed."""
    user_cache.keep(user_cache.cache_file(KIND, question), report)


@cache
def _engine_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(ENGINE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
