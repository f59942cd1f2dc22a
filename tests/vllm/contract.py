"""Each internal of vLLM that the executor relies on, by name, read from sources: of the installed version, or of a
wheel that is not installed.

usage: python -m tests.vllm.contract WHEEL     (prints what another version has moved)
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

Read = Callable[[str], str]
"""The source of a file, by its path below `vllm/`. Raises OSError or KeyError where there is none."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
RUNNER, STATES = "v1/worker/gpu/model_runner.py", "v1/worker/gpu/states.py"
INPUT, BLOCKS, BUFFERS = (f"v1/worker/gpu/{name}.py" for name in ("input_batch", "block_table", "buffer_utils"))
OUTPUT, EXECUTOR = "v1/core/sched/output.py", "v1/executor/multiproc_executor.py"
KV, SPECULATORS = "v1/kv_cache_interface.py", "v1/worker/gpu/spec_decode"


class Relied(NamedTuple):
    """On a definition: that it is there, and what else is not None."""

    file: str
    name: str
    """`Class`, `Class.method` or `function`."""
    parameters: str | None = None
    """These first, in this order."""
    fields: str | None = None
    """Exactly those that have no default."""
    has: tuple[str, ...] = ()
    """Texts that its source has, in this order."""


RELIED = (
    Relied(
        OUTPUT, "SchedulerOutput",
        fields="scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes",
        has=("kv_cache_block_copies:",),
    ),
    Relied(
        OUTPUT, "NewRequestData",
        fields="req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens "
        "lora_request",
        has=("prefill_token_ids:",),
    ),
    Relied(
        OUTPUT, "CachedRequestData",
        fields="req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
        "num_output_tokens",
        has=("def make_empty",),
    ),
    Relied("v1/core/kv_cache_utils.py", "KVCacheBlockCopy", fields="src_block_id dst_block_id"),
    Relied("v1/core/block_pool.py", "BlockPool.__init__", has=("self.null_block",)),
    Relied("v1/engine/core.py", "EngineCore.__init__", "self vllm_config executor_class log_stats",
           has=("self.model_executor", "self.scheduler")),
    Relied("v1/engine/core.py", "EngineCore.shutdown"),
    Relied("v1/executor/abstract.py", "Executor.get_class"),
    Relied("v1/executor/abstract.py", "Executor.get_kv_cache_specs", "self"),
    Relied(KV, "KVCacheSpec", has=("block_size:", "def tokens_per_state", "def page_size_bytes")),
    Relied(KV, "FullAttentionSpec", has=("non_causal:",)),
    Relied(KV, "SlidingWindowSpec"),
    Relied(KV, "ChunkedLocalAttentionSpec"),
    Relied(KV, "KVCacheConfig", has=("num_blocks:", "kv_cache_groups:")),
    Relied("v1/core/kv_cache_utils.py", "get_kv_cache_groups",
           has=("disable_hybrid_kv_cache_manager", "unify_hybrid_kv_cache_specs(")),
    Relied("config/model.py", "ModelConfig",
           has=("def is_attention_free", "def is_hybrid", "def has_inner_state")),
    Relied("v1/worker/gpu_worker.py", "Worker.determine_available_memory", "self",
           has=("self.cache_config.kv_cache_memory_bytes",)),
    Relied("v1/worker/cpu_worker.py", "CPUWorker.determine_available_memory", "self",
           has=("self.cache_config.kv_cache_memory_bytes",)),
    Relied(EXECUTOR, "MultiprocExecutor.__init__", "self vllm_config monitor_workers"),
    Relied(EXECUTOR, "MultiprocExecutor.collective_rpc", "self method timeout args kwargs non_block unique_reply_rank"),
    Relied(EXECUTOR, "MultiprocExecutor._init_executor",
           has=("self.is_failed", "node_rank_within_dp == 0", "get_mp_context()", "self.workers", "self.output_rank")),
    Relied(EXECUTOR, "WorkerProc.make_worker_process", has=("context.Process(",)),
    Relied(EXECUTOR, "WorkerProcHandle", has=("proc:",)),
    Relied("config/parallel.py", "ParallelConfig", has=("master_addr:", "master_port:", "node_rank:", "nnodes:")),
    Relied("config/speculative.py", "SpeculativeConfig", has=("num_speculative_tokens_per_batch_size:",)),
    Relied("config/vllm.py", "VllmConfig.compute_hash", has=("additional_config.compute_hash()",)),
    Relied("config/vllm.py", "VllmConfig._validate_v2_model_runner", has=("HAS_TRITON",)),
    Relied("triton_utils/dispatcher.py", "register_kernels", "overrides"),
    Relied("v1/worker/gpu_worker.py", "Worker.execute_model", "self scheduler_output"),
    Relied("v1/worker/gpu_worker.py", "Worker.sample_tokens", "self grammar_output"),
    Relied("v1/worker/gpu_worker.py", "Worker._make_model_runner",
           has=("vllm.v1.worker.gpu.model_runner", "GPUModelRunner")),
    Relied("v1/worker/cpu_worker.py", "CPUWorker.init_device",
           has=("vllm.v1.worker.cpu.model_runner", "CPUModelRunner")),
    Relied(RUNNER, "GPUModelRunner.__init__", "self vllm_config device",
           has=("init_speculator(", "execute_model_state")),
    Relied(RUNNER, "GPUModelRunner.initialize_kv_cache",
           has=("self.attn_groups", "self.block_tables", "ModelCudaGraphManager(", "decode_query_len=",
                "varlen_decode=")),
    Relied(RUNNER, "GPUModelRunner.execute_model",
           has=("self.finish_requests(", "self.add_requests(", "self.update_requests(",
                "self.block_tables.apply_staged_writes()", "self.prepare_inputs(", "dummy_run")),
    Relied(RUNNER, "GPUModelRunner.update_requests", "self scheduler_output", has=("copy_kv_cache_blocks_inplace",)),
    Relied(RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
    Relied(RUNNER, "GPUModelRunner.sample",
           has=("hidden_states[input_batch.logits_indices]", "self.model.compute_logits(")),
    Relied(RUNNER, "GPUModelRunner.postprocess_sampled",
           "self idx_mapping sampled_tokens num_sampled num_rejected query_start_loc"),
    Relied(RUNNER, "ExecuteModelState", has=("input_batch:", "hidden_states:")),
    Relied("v1/worker/cpu/model_runner.py", "CPUModelRunner"),
    Relied(STATES, "RequestState.__init__",
           has=("self.req_id_to_index", "self.all_token_ids", "self.total_len", "self.num_computed_tokens",
                "self.last_sampled_tokens", "self.draft_tokens")),
    Relied(BUFFERS, "StagedWriteTensor.stage_write_elem", "self index x"),
    Relied(BUFFERS, "StagedWriteTensor.apply_write", "self"),
    Relied(BUFFERS, "StagedWriteTensor.clear_staged_writes", "self"),
    Relied(INPUT, "InputBatch",
           has=("req_ids:", "num_reqs:", "idx_mapping:", "num_scheduled_tokens:", "num_draft_tokens_per_req:",
                "query_start_loc:", "num_computed_tokens_np:", "prefill_len_np:", "logits_indices:")),
    Relied("v1/worker/gpu/attn_utils.py", "get_varlen_cudagraph_unsupported_backend",
           "attn_groups vllm_config max_query_len"),
    Relied("v1/worker/gpu/model_states/interface.py", "ModelState.get_additional_cg_support", "self"),
    Relied("v1/worker/gpu/eplb_utils.py", "step_eplb_after"),
    Relied("v1/worker/gpu/cudagraph_utils.py", "ModelCudaGraphManager.__init__",
           "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode"),
    Relied("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager._init_candidates",
           has=("build_dynamic_sd_schedule_lookup(", "self.varlen_decode",
                "descs.sort(key=lambda d: d.num_tokens, reverse=True)", "self._capture_descs[mode]",
                "self._candidates.setdefault(key")),
    Relied("v1/worker/gpu/cudagraph_utils.py", "BatchExecutionDescriptor",
           has=("num_tokens:", "uniform_token_count:", "num_active_loras:", "num_ubatches:")),
    # What the engine of draft models relies on besides.
    Relied("v1/executor/uniproc_executor.py", "UniProcExecutor._init_executor", has=("self.driver_worker",)),
    Relied("v1/worker/worker_base.py", "WorkerWrapperBase", has=("self.worker",)),
    Relied("v1/worker/gpu_worker.py", "Worker.determine_available_memory", "self",
           has=("self.cache_config.kv_cache_memory_bytes",)),
    Relied("v1/worker/cpu_worker.py", "CPUWorker.determine_available_memory", "self",
           has=("self.cache_config.kv_cache_memory_bytes",)),
    Relied(RUNNER, "GPUModelRunner.__init__", has=("set_default_max_concurrency(vllm_config.max_concurrent_batches)",)),
    Relied(RUNNER, "GPUModelRunner.gather_batch_req_state",
           has=("self.req_states.prefill_len.np", "one_token_ext", "decode_graph_eligible")),
    Relied(STATES, "RequestState.__init__", has=("self.prefill_len = UvaBackedTensor(",)),
    Relied(BUFFERS, "set_default_max_concurrency", "n"),
    Relied(BUFFERS, "UvaBackedTensor.copy_to_uva", "self n"),
    Relied(BUFFERS, "StagedWriteTensor.stage_write", "self index start x"),
    Relied(BLOCKS, "BlockTables.append_block_ids", "self req_index new_block_ids overwrite",
           has=("self.num_blocks.np[i, req_index] if not overwrite",)),
    Relied(BLOCKS, "BlockTables.apply_staged_writes", "self", has=("self.num_blocks.copy_to_uva()",)),
    # What vLLM's own speculators beside the target are asked for.
    Relied(RUNNER, "GPUModelRunner.__init__",
           has=("self.speculator = init_speculator(", "self.use_aux_hidden_state_outputs = True")),
    Relied(RUNNER, "GPUModelRunner.load_model", has=("self.speculator.load_model(self.model)",)),
    Relied(RUNNER, "GPUModelRunner.initialize_kv_cache",
           has=("self.speculator.set_attn(", "self.speculator.init_cudagraph_manager(")),
    Relied(RUNNER, "GPUModelRunner.sample_tokens",
           has=("get_drafter_hidden_states(", "use_workspace_lane(", "self.speculator.propose(", "num_sampled",
                "num_rejected", "self.req_states.last_sampled_tokens", "self.req_states.next_prefill_tokens",
                "self.sampler.sampling_states.temperature.gpu", "self.sampler.sampling_states.seeds.gpu",
                "num_speculative_tokens=", "dp_sync_state=")),
    Relied(RUNNER, "ExecuteModelState",
           has=("attn_metadata:", "slot_mappings_by_layer:", "aux_hidden_states:", "dp_sync_state:")),
    Relied(STATES, "RequestState.__init__", has=("self.next_prefill_tokens",)),
    Relied(f"{SPECULATORS}/__init__.py", "init_speculator", "vllm_config device req_states",
           has=('"dflash"', '"dspark"', '"mtp"', "use_eagle()")),
    Relied(f"{SPECULATORS}/utils.py", "get_drafter_hidden_states", "model hidden_states"),
    Relied("v1/worker/workspace.py", "use_workspace_lane", "lane"),
    Relied(f"{SPECULATORS}/speculator.py", "BaseSpeculator.propose",
           "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected "
           "last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run "
           "mm_inputs is_profile num_speculative_tokens"),
    Relied(f"{SPECULATORS}/speculator.py", "DraftModelSpeculator.__init__",
           has=("self.num_speculative_steps = self.speculative_config.num_speculative_tokens",)),
    Relied(f"{SPECULATORS}/speculator.py", "DraftModelSpeculator.compute_draft_logits",
           "self hidden_states spec_step_idx"),
    Relied(f"{SPECULATORS}/speculator.py", "DraftModelSpeculator.sample_draft",
           "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits "
           "spec_step_idx"),
    Relied(f"{SPECULATORS}/speculator.py", "DraftModelSpeculator._copy_request_inputs",
           has=("self.idx_mapping.fill_(-1)",)),
    Relied(f"{SPECULATORS}/target_dependent_ar/speculator.py", "TargetDependentARSpeculator.propose",
           has=("if num_speculative_tokens <= 1:", "return self.draft_tokens[:num_reqs]")),
    Relied(f"{SPECULATORS}/target_dependent_ar/speculator.py", "TargetDependentARSpeculator._prefill",
           has=("sample_src_positions = positions + 1", "self.sample_draft(")),
    Relied(f"{SPECULATORS}/dflash/speculator.py", "DFlashSpeculator._generate_draft",
           has=("self.sample_draft(", "self.sample_pos[:num_sample] - 1")),
    Relied(f"{SPECULATORS}/dspark/speculator.py", "DSparkSpeculator._sample_logits",
           "self logits idx_map sample_pos step", has=("self.model.map_draft_to_target(",)),
    Relied("config/speculative.py", "SpeculativeConfig",
           has=("num_speculative_tokens:", "def use_dflash", "def use_dspark")),
    Relied(f"{SPECULATORS}/target_dependent_ar/speculator.py", "_prepare_prefill_inputs_kernel",
           "last_token_indices_ptr draft_current_step_ptr draft_input_ids_ptr draft_positions_ptr "
           "draft_query_start_loc_ptr draft_seq_lens_ptr target_input_ids_ptr target_positions_ptr idx_mapping_ptr "
           "last_sampled_ptr next_prefill_tokens_ptr num_sampled_ptr num_rejected_ptr query_start_loc_ptr seq_lens_ptr "
           "max_num_reqs BLOCK_SIZE"),
    Relied(f"{SPECULATORS}/target_dependent_ar/speculator.py", "_prepare_decode_inputs_kernel",
           "draft_tokens_ptr draft_tokens_stride target_seq_lens_ptr num_rejected_ptr input_ids_ptr positions_ptr "
           "sample_src_positions_ptr query_start_loc_ptr seq_lens_ptr max_model_len max_num_reqs BLOCK_SIZE "
           "ADVANCE_DRAFT_POSITIONS"),
    Relied(f"{SPECULATORS}/target_dependent_ar/speculator.py", "_update_draft_inputs_kernel",
           "output_draft_tokens_ptr output_draft_tokens_stride next_input_hidden_states_ptr "
           "next_input_hidden_states_stride input_ids_ptr positions_ptr sample_src_positions_ptr seq_lens_ptr "
           "draft_tokens_ptr current_draft_step_ptr hidden_states_ptr hidden_states_stride hidden_size max_model_len "
           "num_speculative_steps BLOCK_SIZE ADVANCE_DRAFT_POSITIONS"),
    Relied(f"{SPECULATORS}/dflash/speculator.py", "_prepare_dflash_inputs_kernel",
           "out_input_ids_ptr out_query_positions_ptr out_query_start_loc_ptr out_seq_lens_ptr "
           "out_query_slot_mapping_ptr out_context_positions_ptr out_context_slot_mapping_ptr out_sample_indices_ptr "
           "out_sample_pos_ptr out_sample_idx_mapping_ptr out_temperature_ptr out_seeds_ptr target_positions_ptr "
           "target_query_start_loc_ptr idx_mapping_ptr last_sampled_ptr next_prefill_tokens_ptr num_sampled_ptr "
           "num_rejected_ptr temperature_ptr seeds_ptr block_table_ptr block_table_stride parallel_drafting_token_id "
           "block_size num_query_per_req num_speculative_steps max_num_reqs max_num_tokens max_model_len cp_rank "
           "SAMPLE_FROM_ANCHOR"),
    # What `cpu_kernels` stand in for.
    Relied(BUFFERS, "_apply_write_kernel",
           "output_ptr output_stride write_indices_ptr write_starts_ptr write_contents_ptr write_cu_lens_ptr "
           "write_group_ids_ptr BLOCK_SIZE"),
    Relied(INPUT, "_prepare_prefill_inputs_kernel",
           "input_ids_ptr next_prefill_tokens_ptr next_prefill_tokens_stride num_lookahead idx_mapping_ptr "
           "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride prefill_lens_ptr num_computed_tokens_ptr "
           "BLOCK_SIZE"),
    Relied(INPUT, "_prepare_pos_seq_lens_kernel",
           "pos_ptr seq_lens_ptr idx_mapping_ptr query_start_loc_ptr num_computed_tokens_ptr max_num_reqs BLOCK_SIZE"),
    Relied(INPUT, "_combine_sampled_and_draft_tokens_kernel",
           "input_ids_ptr idx_mapping_ptr last_sampled_tokens_ptr query_start_loc_ptr seq_lens_ptr prefill_len_ptr "
           "draft_tokens_ptr draft_tokens_stride cu_num_logits_ptr logits_indices_ptr BLOCK_SIZE"),
    Relied(INPUT, "_expand_idx_mapping_kernel",
           "idx_mapping_ptr expanded_idx_mapping_ptr expanded_local_pos_ptr cu_num_logits_ptr BLOCK_SIZE"),
    Relied(INPUT, "_post_update_kernel",
           "idx_mapping_ptr num_computed_tokens_ptr last_sampled_tokens_ptr output_bin_counts_ptr "
           "output_bin_counts_stride sampled_tokens_ptr sampled_tokens_stride num_sampled_ptr num_rejected_ptr "
           "query_start_loc_ptr all_token_ids_ptr all_token_ids_stride total_len_ptr"),
    Relied(BLOCKS, "_gather_block_tables_kernel",
           "batch_idx_to_req_idx src_block_table_ptrs dst_block_table_ptrs block_table_strides num_blocks_ptr "
           "num_blocks_stride num_reqs BLOCK_SIZE"),
    Relied(BLOCKS, "_compute_slot_mappings_kernel",
           "max_num_tokens idx_mapping query_start_loc pos block_table_ptrs block_table_strides block_sizes "
           "slot_mapping_enabled dcp_sharded slot_mappings_ptr slot_mappings_stride cp_rank CP_SIZE"),
)  # fmt: skip


def moved(read: Read) -> list[str]:
    """What is not as the executor relies on it, each with how it is."""
    return [f"{each.file}: {each.name}: {how}" for each in RELIED for how in _differences(each, read)]


def _differences(relied: Relied, read: Read) -> Iterator[str]:
    try:
        text = read(relied.file)
    except (OSError, KeyError):
        yield "there is no such file"
        return
    found = _definition(ast.parse(text), relied.name.split("."))
    if found is None:
        yield "there is no such definition"
        return
    if relied.parameters is not None and (given := _parameters(found))[: len(relied.parameters)] != relied.parameters:
        yield f"its parameters are {given}"
    if relied.fields is not None and (required := _required(found)) != relied.fields:
        yield f"its fields without a default are {required}"
    rest = ast.get_source_segment(text, found) or ""
    for piece in relied.has:
        _, there, behind = rest.partition(piece)
        if not there:
            yield f"it has no {piece} in this place"
        rest = behind or rest


def _parameters(found: Definition) -> str:
    if isinstance(found, ast.ClassDef):
        return ""
    return " ".join(each.arg for each in (*found.args.posonlyargs, *found.args.args))


def _required(found: Definition) -> str:
    fields = [each for each in found.body if isinstance(each, ast.AnnAssign) and each.value is None]
    return " ".join(each.target.id for each in fields if isinstance(each.target, ast.Name))


def _definition(module: ast.Module, path: list[str]) -> Definition | None:
    """Also below conditions of the module."""
    body: list[ast.stmt] = module.body
    found: Definition | None = None
    for name in path:
        found = None
        for each in body:
            if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
                found = each
        if found is None:
            return None
        body = found.body
    return found


def installed() -> Read:
    import vllm

    folder = Path(vllm.__file__).parent
    return lambda file: (folder / file).read_text()


def of_wheel(path: Path) -> Read:
    wheel = zipfile.ZipFile(path)
    return lambda file: wheel.read(f"vllm/{file}").decode()


if __name__ == "__main__":
    print("\n".join(moved(of_wheel(Path(sys.argv[1])))) or "nothing has moved")
