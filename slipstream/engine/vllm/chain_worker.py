"""vLLM's worker for chains of a draft model: the class that `worker_cls` names."""

from __future__ import annotations

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker  # first: it gives torch what CPUs lack
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
from slipstream.engine.vllm.chain_runner import ChainRunner
from slipstream.engine.vllm.device_runner import take_place
from slipstream.engine.vllm.engine import KV_TOKENS
from slipstream.engine.vllm.options import kv_bytes


class ChainWorker(BaseWorker):  # type: ignore[misc]
    """Its runner is a `ChainRunner`."""

    def init_device(self) -> None:
        take_place(ChainRunner)
        super().init_device()

    def determine_available_memory(self) -> int:
        """Bytes for KV: those of the drafter's tokens, unless the operator gave others."""
        if (tokens := self.vllm_config.additional_config.get(KV_TOKENS, 0)) > 0:
            self.cache_config.kv_cache_memory_bytes = kv_bytes(list(self.get_kv_cache_spec().values()), tokens)
        return int(super().determine_available_memory())
