"""vLLM's Model Runner V2 for chains of a draft model: the engine says where each pass begins, and what it reads may be
on the device alone. Sampling is the caller's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu import model_runner as vllm_runner

from slipstream.engine.devices import upload
from slipstream.engine.vllm.device_runner import BaseRunner

PASSES_AHEAD = 8
"""Most passes that the device is given while the host does not wait for it: vLLM's buffers of what it copies there are
used in turn."""


class PassStart(NamedTuple):
    """Where a request's part of a pass begins."""

    name: str
    computed: int
    """Leading tokens with KV that stays."""
    blocks: int
    """Leading blocks of those that the runner has; what the scheduler output adds stands behind them."""
    tokens: list[int]
    """Tokens that it computes; empty where that is the one token of `ChainRunner.feed`."""


class ChainRunner(BaseRunner):  # type: ignore[misc]
    """Runs the passes of a `slipstream.engine.vllm.engine.VLLMEngine`, and those with which vLLM warms up."""

    execute_model_state: Any
    """vLLM's, between a pass and its sampling."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        limit = vllm_runner.set_default_max_concurrency
        vllm_runner.set_default_max_concurrency = lambda count: limit(max(count, PASSES_AHEAD))
        try:
            super().__init__(vllm_config, device)
        finally:
            vllm_runner.set_default_max_concurrency = limit

    def update_requests(self, scheduler_output: Any) -> None:
        """Once new requests have their places."""
        self._begin(getattr(scheduler_output, "starts", ()))  # vLLM's own steps, to warm up, have none
        super().update_requests(scheduler_output)

    def _begin(self, starts: tuple[PassStart, ...]) -> None:
        states = self.req_states
        for each in starts:
            place = states.req_id_to_index[each.name]
            states.num_computed_tokens.stage_write_elem(place, each.computed)
            self.block_tables.num_blocks.np[:, place] = each.blocks
            if each.tokens:
                states.all_token_ids.stage_write(place, each.computed, each.tokens)
                states.prefill_len.np[place] = each.computed + len(each.tokens)
        states.num_computed_tokens.apply_write()
        if any(each.tokens for each in starts):
            states.all_token_ids.apply_write()
            states.prefill_len.copy_to_uva()

    @torch.inference_mode()
    def compute(self, scheduler_output: Any) -> tuple[list[str], Tensor]:
        """Runs a pass. Returns the requests in the runner's order and the logits [N, V] behind the last token of each,
        in the model's type; waits for nothing."""
        try:
            self.execute_model(scheduler_output)
        except BaseException:
            self._drop_staged()
            raise
        finally:
            state, self.execute_model_state = self.execute_model_state, None
        batch = state.input_batch
        return batch.req_ids, self.model.compute_logits(state.hidden_states[batch.logits_indices])

    def feed(self, names: list[str], tokens: Tensor) -> None:
        """Gives each of these requests its next token, int64 [N] on the device."""
        states = self.req_states
        places = upload(torch.tensor([states.req_id_to_index[name] for name in names]), self.device)
        states.last_sampled_tokens.index_copy_(0, places, tokens[:, None])

    def _drop_staged(self) -> None:
        """Drops the writes of a pass that failed: its requests are sent anew."""
        states = self.req_states
        for each in (
            states.all_token_ids,
            states.total_len,
            states.num_computed_tokens,
            *self.block_tables.block_tables,
        ):
            each.clear_staged_writes()
