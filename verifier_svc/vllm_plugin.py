"""The names of classes that gave remote drafters to a vLLM server that people run themselves: kept for one release, to
say what to use instead. They needed vLLM's V1 runner, which V2 replaces."""

from __future__ import annotations

GONE = ("CoupledWorker", "RemoteProposer")


def __getattr__(name: str) -> object:
    if name in GONE:
        raise ImportError(
            f"verifier_svc.vllm_plugin.{name} went with vLLM's V1 model runner; run the target by VERIFIER_ENGINE=vllm "
            "instead (docs/deployment.md)."
        )
    raise AttributeError(name)
