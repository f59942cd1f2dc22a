"""vLLM's Model Runner V2 with candidates that come with the scheduler outputs, and our sampling. Runs in the worker
processes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import model_runner as vllm_runner
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.eplb_utils import step_eplb_after

from slipstream.engine.devices import upload
from slipstream.engine.vllm.device_runner import BaseRunner
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.messages import EXTRA, Graphs, Indices, SampledStep, SessionParameters, StepMasks
from verifier_svc.execution.vllm.requests import Rewound
from verifier_svc.execution.vllm.speculator import StepSpeculator
from verifier_svc.execution.vllm.step_sampler import StepRows, StepSampler


class DecodeGraphs(ModelCudaGraphManager):  # type: ignore[misc]
    """vLLM's graphs. Of those for chains of one length each, vLLM offers a step only the smallest that has its rows,
    whatever its length: mostly one for another length, so that a step between two sizes has none."""

    def _init_candidates(self) -> None:
        super()._init_candidates()
        smallest_last = self._capture_descs.get(CUDAGraphMode.FULL, [])
        for (rows, adapters), offered in self._candidates.items():
            fitting = {
                (each.uniform_token_count, each.num_ubatches): each
                for each in smallest_last
                if each.num_tokens >= rows and each.num_active_loras == adapters and each.uniform_token_count
            }
            offered[:0] = [each for each in fitting.values() if each not in offered]


class StepRunner(BaseRunner):  # type: ignore[misc]
    """Runs the steps of a `verifier_svc.execution.vllm.executor.VLLMExecutor`, and those with which vLLM warms up."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._drafting: StepSpeculator | None = None
        vllm_runner.init_speculator = self._open_speculator
        super().__init__(vllm_config, device)
        self.step_sampler = StepSampler(self.vocab_size, device)
        self._logits: torch.Tensor | None = None
        """Logits of the step that ran and is not sampled yet."""

    _depth = _full_depth = 0
    """Draft tokens of each request behind the present step, and most of them."""

    def _open_speculator(self, config: Any, device: torch.device, states: Any) -> Any:
        """In place of vLLM's own function. Without settings candidates come with the scheduler outputs alone."""
        settings = config.additional_config.speculator
        if settings is None:
            return None
        self._drafting = StepSpeculator(settings, config, device, states)
        self._depth = self._full_depth = settings.depth
        return self._drafting.vllm

    def initialize_kv_cache(self, *args: Any, **options: Any) -> None:
        vllm_runner.ModelCudaGraphManager = self._graph_manager
        super().initialize_kv_cache(*args, **options)

    def _graph_manager(self, config: Any, device: torch.device, mode: Any, **options: Any) -> Any:
        """vLLM's, which captures a decode graph for each number of rows: for chains of any lengths where the attention
        takes them, else for each of some lengths."""
        speculation = config.speculative_config
        self.graphs = graphs_of(config, mode, self._uneven(config), self.decode_query_len - 1)
        lengths = self.graphs.lengths
        # Where the length depends on the number of requests, vLLM captures all that occur.
        schedule = [(number, number, length) for number, length in enumerate(lengths, 1)]
        speculation.num_speculative_tokens_per_batch_size = schedule or None
        try:
            return DecodeGraphs(config, device, mode, **options | {"varlen_decode": not lengths})
        finally:
            speculation.num_speculative_tokens_per_batch_size = None

    def _uneven(self, config: Any) -> str:
        """Names the reason against one graph for chains of several lengths; empty where there is none."""
        if found := get_varlen_cudagraph_unsupported_backend(self.attn_groups, config, self.decode_query_len):
            return str(found[0])
        support, name = self.model_state.get_additional_cg_support()
        return "" if support == AttentionCGSupport.ALWAYS else str(name)

    def update_requests(self, scheduler_output: Any) -> None:
        """Once new requests have their places: what the verifier knows better, and the candidates."""
        if rewound := getattr(scheduler_output, "rewound", None):
            self._rewind(rewound)
        super().update_requests(scheduler_output)
        chains = scheduler_output.scheduled_spec_decode_tokens
        if chains:
            places = [self.req_states.req_id_to_index[name] for name in chains]
            self._write_candidates(places, list(chains.values()))
        added = scheduler_output.scheduled_new_reqs
        new = [(each.req_id, _parameters(each.sampling_params), each.prefill_token_ids) for each in added]
        if self._drafting is not None:
            places = [self.req_states.req_id_to_index[name] for name, _, _ in new]
            self._drafting.sampler.begin(places, [parameters.sampling for _, parameters, _ in new])
        self._depth = getattr(scheduler_output, "draft_depth", self._full_depth)
        self.step_sampler.begin(
            new,
            scheduler_output.finished_req_ids,
            chains,
            getattr(scheduler_output, "proposals", None),
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        """vLLM's, and the logits, which vLLM computes when it samples. Tensor-parallel workers gather them from each
        other, so a worker that fails in its sampling alone, where all have the same logits, leaves no other waiting."""
        output = super().execute_model(scheduler_output, *args, **options)
        state = self.execute_model_state
        if state is not None and not options.get("dummy_run"):
            self._logits = self.model.compute_logits(state.hidden_states[state.input_batch.logits_indices])
        return output

    def drop_unfinished(self) -> None:
        """Forgets a step that failed before it was sampled: its requests are sent anew."""
        self.execute_model_state = self._logits = None
        states = self.req_states
        tables = self.block_tables.block_tables
        for each in (states.all_token_ids, states.total_len, states.num_computed_tokens, *tables):
            each.clear_staged_writes()

    def _rewind(self, rewound: list[Rewound]) -> None:
        states = self.req_states
        for each in rewound:
            place = states.req_id_to_index[each.name]
            states.num_computed_tokens.stage_write_elem(place, each.computed)
            states.total_len.stage_write_elem(place, each.tokens)
            states.last_sampled_tokens[place] = each.last
        states.num_computed_tokens.apply_write()
        states.total_len.apply_write()

    def _write_candidates(self, places: list[int], chains: list[list[int]]) -> None:
        """By one copy to the device."""
        width = max(map(len, chains))
        packed = np.zeros((len(chains), 1 + width), np.int64)
        packed[:, 0] = places
        for row, chain in zip(packed, chains, strict=True):
            row[1 : 1 + len(chain)] = np.maximum(chain, 0)  # what pads a chain is no token
        there = upload(torch.from_numpy(packed), self.device)
        self.req_states.draft_tokens[:, :width].index_copy_(0, there[:, 0], there[:, 1:])

    @torch.inference_mode()
    @step_eplb_after()  # type: ignore[untyped-decorator]
    def sample_tokens(self, masks: StepMasks | None) -> SampledStep:
        """In place of vLLM's own. Raises RuntimeError for a step that did not run."""
        state, logits = self.execute_model_state, self._logits
        self.execute_model_state = self._logits = None
        if state is None or logits is None:
            raise RuntimeError("the step did not run")
        batch = state.input_batch
        masks = masks if isinstance(masks, StepMasks) else None  # vLLM warms up with masks of its own
        rows, decided = self.step_sampler.decide(logits, _rows(batch), masks)
        self.postprocess_sampled(batch.idx_mapping, decided.tokens, *decided.counts, batch.query_start_loc)
        drafts = None if self._drafting is None else self._drafting.propose(self, state, decided, self._depth)
        return self.step_sampler.fetch(rows, decided, drafts, self._depth)


def graphs_of(config: Any, mode: Any, uneven: str, longest: int) -> Graphs:
    """`mode`: what vLLM made of the operator's for the model; `uneven`: the attention that takes chains of one length
    alone, if there is one."""
    if mode.decode_mode() != CUDAGraphMode.FULL:
        path = "piecewise" if mode.has_piecewise_cudagraphs() else "eager"
        asked = config.model_config.enforce_eager
        return Graphs(path, "" if asked else f"vLLM replays no full CUDA graphs for this model ({mode.name})")
    if not uneven:
        return Graphs("full")
    lengths = (0, *(1 << power for power in range(longest.bit_length()) if 1 << power < longest), longest)
    notice = f"{uneven} replays CUDA graphs of equal chains alone: chains are padded to {', '.join(map(str, lengths))}"
    return Graphs("padded", notice, lengths)


def _parameters(given: Any) -> SessionParameters:
    packed = (given.extra_args or {}).get(EXTRA)
    return SessionParameters.unpack(packed) if packed else SessionParameters(SamplingParams(temperature=0.0), 1)


def _rows(batch: Any) -> StepRows:
    counts: Indices = np.zeros(batch.num_reqs, np.int64)
    if batch.num_draft_tokens_per_req is not None:
        counts += batch.num_draft_tokens_per_req
    lengths = batch.num_computed_tokens_np.astype(np.int64) + batch.num_scheduled_tokens - counts
    return StepRows(batch.req_ids, counts, lengths, lengths >= batch.prefill_len_np)
