"""vLLM's own speculator (EAGLE 3, MTP, DFlash, DSpark) beside the target in its worker, with our sampling.

vLLM's runner loads it and keeps its KV in the target's blocks; here are its settings, and the pass after a step.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.utils import get_drafter_hidden_states
from vllm.v1.worker.workspace import use_workspace_lane

from slipstream.engine.sampler.fused import Decided
from verifier_svc.execution.vllm.draft_sampler import DraftSampler
from verifier_svc.execution.vllm.messages import SpeculatorSettings


class StepSpeculator:
    """Drafts for all requests of a step once its tokens are decided. Waits for nothing."""

    def __init__(self, settings: SpeculatorSettings, config: Any, device: torch.device, states: Any) -> None:
        """Raises vLLM's own errors for a method that Model Runner V2 does not have."""
        own = copy.copy(config)  # the runner's chains may be longer than what is drafted
        own.speculative_config = copy.copy(config.speculative_config)
        own.speculative_config.num_speculative_tokens = settings.depth
        self.vllm = init_speculator(own, device, states)
        self._settings = settings
        self._lane = int(own.speculative_config.use_dspark())
        self.sampler = DraftSampler(config.scheduler_config.max_num_seqs, settings.depth, device)
        self.vllm.sample_draft = self._sample
        if hasattr(self.vllm, "_sample_logits"):  # DSpark's, whose logits may be of a vocabulary of its own
            self.vllm._sample_logits = self._sample_step

    def propose(self, runner: Any, state: Any, decided: Decided, depth: int) -> Tensor | None:
        """int32 [2, N, D]: draft tokens and the bits of their log-probabilities, of which `depth` mean anything. With
        depth 0 only the KV of the step's tokens is computed; None where that cannot be done alone."""
        if not depth and self._settings.in_one_pass:
            return None
        batch = state.input_batch
        with use_workspace_lane(self._lane):
            tokens = self.vllm.propose(
                batch,
                state.attn_metadata,
                state.slot_mappings_by_layer,
                get_drafter_hidden_states(runner.model, state.hidden_states),
                state.aux_hidden_states,
                *decided.counts,
                runner.req_states.last_sampled_tokens,
                runner.req_states.next_prefill_tokens,
                runner.sampler.sampling_states.temperature.gpu,
                runner.sampler.sampling_states.seeds.gpu,
                num_speculative_tokens=depth,
                dp_sync_state=state.dp_sync_state,
            )
        if not depth:
            return None
        log_probs = self.sampler.log_probs(batch.idx_mapping[: batch.num_reqs])
        return torch.stack([tokens.to(torch.int32), log_probs.view(torch.int32)])

    def _sample(
        self, hidden: Tensor, sources: Tensor, places: Tensor, _temperature: Tensor, _seeds: Tensor, column: Tensor,
        _cache: Tensor | None, spec_step_idx: int = 0,
    ) -> Tensor:  # fmt: skip
        """In place of vLLM's `sample_draft`. `sources`: the positions before those of the tokens."""
        logits = self.vllm.compute_draft_logits(hidden, spec_step_idx)
        return self.sampler.choose(logits, places, sources + 1, column)

    def _sample_step(self, logits: Tensor, places: Tensor, positions: Tensor, step: int) -> Tensor:
        """In place of DSpark's `_sample_logits`."""
        every = torch.arange(logits.shape[-1], device=logits.device)
        return self.sampler.choose(
            logits, places, positions, self.vllm._step_cols[step], self.vllm.model.map_draft_to_target(every)
        )
