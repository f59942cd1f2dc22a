"""Remote drafters for a vLLM server that people run themselves: classes that vLLM is given by name.

`RemoteProposer` attaches each request to a drafter and proposes the likeliest chain of what that pushed so far.
`CoupledWorker` makes each token a function of seed and position, so that a text does not depend on who drafted. Logits
are processed by vLLM. Drafters that are late or gone cost candidates, never a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler

from slipstream.engine.models.checkpoint import describe_checkpoint
from slipstream.engine.sampler.coupled_sampling import choose
from slipstream.rpc import DRAFTER, proto_conversion
from slipstream.rpc.channel import dialer
from slipstream.rpc.tls import certificates_from_env
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.v1 import verifier_pb2
from verifier_svc.session import Session, SessionRequest
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.wait_policy.draft_threshold import LEVELS

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

log = logging.getLogger(__name__)

DRAFTERS = "slipstream_drafters"
"""Key in vLLM's `additional_config`: a list of HOST:PORT."""
RETRY_S = 1.0
"""Seconds after which a request whose drafter failed gets the next one."""
PROPOSE_S = 0.5
"""Most seconds that a step waits for the thread of the drafters, which only does bookkeeping."""
GREEDY = 1e-5
"""vLLM's own bound: temperatures below it are greedy."""


class RequestTokens(NamedTuple):
    """What a step committed to one request."""

    name: str
    base: int
    """Tokens before; 0 where the request is new, or its text is not the one that was known."""
    token_ids: list[int]


class RemoteDrafts:
    """The requests of one vLLM server on their drafters. Lives on a thread and an event loop of its own."""

    def __init__(self, drafters: Sequence[str], model: str, most: int) -> None:
        target = proto_conversion.model_to_proto(describe_checkpoint(model))
        dial = dialer(DRAFTER, certificates_from_env())
        self._drafters = [verifier_pb2.DrafterAddress(address=address, name=address) for address in drafters]
        self._sources = CandidateSources(target, LEVELS[0], dial=dial)
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=[self._sources.run()], name="drafters", daemon=True
        )
        self._thread.start()

    def propose(self, committed: Sequence[RequestTokens], parameters: dict[str, Any]) -> list[list[int]]:
        """A chain for each request; none where the drafters' thread does not answer. `parameters` are vLLM's, of each
        request that is new here, with the prompt's length."""
        if not self._thread.is_alive():
            return [[] for _ in committed]
        work = asyncio.run_coroutine_threadsafe(self._advance(committed, parameters), self._loop)
        return work.result(PROPOSE_S)

    def close(self, names: Collection[str]) -> None:
        self._loop.call_soon_threadsafe(self._close, names)

    # On the drafters' thread.

    async def _advance(self, committed: Sequence[RequestTokens], parameters: dict[str, Any]) -> list[list[int]]:
        for each in committed:
            session = self._sessions.get(each.name)
            if session is None or each.base != len(session.tokens):
                self._close([each.name])
                self._open(each, *parameters[each.name])
            else:
                session.commit(each.token_ids, each.base)
                self._sources.root_moved(session)
                self._sources.committed(session, each.base, each.token_ids)
        sessions = [self._sessions[each.name] for each in committed]
        return [
            list(each.tree.select_likeliest_chain(min(self._most, each.draft_limit)).token_ids) for each in sessions
        ]

    def _open(self, new: RequestTokens, sampling: SamplingParams, prompt_length: int, max_length: int) -> None:
        number = next(self._numbers)

        def retry() -> None:
            self._loop.call_later(RETRY_S, self._attach, session, number + 1)

        request = SessionRequest(
            id=new.name,
            number=number,
            epoch=number,
            sampling=sampling,
            prompt_length=prompt_length,
            max_length=max_length,
            stop_token_ids=frozenset(),
            max_draft_tokens=self._most,
            stream=_DrafterFailures(retry),
        )
        session = self._sessions[new.name] = Session(
            request,
            tokens=list(new.token_ids),
            credit=None,
            tree=CandidateTree(new.token_ids),
            history=None,
        )
        self._attach(session, number)

    def _attach(self, session: Session, turn: int) -> None:
        if self._sessions.get(session.request.id) is session:
            self._sources.attach_session(session, [self._drafters[turn % len(self._drafters)]])

    def _close(self, names: Collection[str]) -> None:
        for name in names:
            if (session := self._sessions.pop(name, None)) is not None:
                self._sources.detach_session(session)


class _DrafterFailures:
    """Takes the place of the stream to a gateway, which would name another drafter."""

    def __init__(self, retry: Callable[[], None]) -> None:
        self._retry = retry

    def send(self, reply: verifier_pb2.Round | verifier_pb2.DrafterEvent) -> None:
        if isinstance(reply, verifier_pb2.DrafterEvent) and reply.HasField("failure"):
            self._retry()

    def end(self, end: verifier_pb2.SessionEnd) -> None:
        """vLLM ends its requests itself."""


class RemoteProposer:
    """vLLM's `custom_class` proposer. Only the rank whose drafts vLLM reads talks with drafters."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._runner: Any = None
        self._drafts: RemoteDrafts | None = None
        self._lengths: dict[str, int] = {}
        self._failing = False
        """True after a step without an answer, so that it is told once."""

    def load_model(self, model: Any) -> None:
        """Nothing to load."""

    def bind(self, runner: Any, *, leads: bool) -> None:
        """Called by the worker: vLLM itself passes no names of requests. Raises ValueError without drafters."""
        self._runner = runner
        if not (drafters := self._config.additional_config.get(DRAFTERS)):
            raise ValueError(f'name the drafters by --additional-config \'{{"{DRAFTERS}": ["HOST:PORT"]}}\'.')
        if leads:
            most = self._config.speculative_config.num_speculative_tokens
            self._drafts = RemoteDrafts(drafters, self._config.model_config.model, most)

    def finish(self, names: Collection[str]) -> None:
        """These requests have ended."""
        if self._drafts is not None and names:
            self._drafts.close(list(names))
            for name in names:
                self._lengths.pop(name, None)

    def propose(
        self, sampled: list[list[int]], lengths: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], **_: Any
    ) -> list[list[int]]:
        """A list of tokens for each row; `lengths` count what was `sampled`. Empty while a prompt is read."""
        proposed: list[list[int]] = [[] for _ in sampled]
        rows = [row for row, new in enumerate(sampled) if new]
        if self._drafts is None or not rows:
            return proposed
        names = self._runner.input_batch.req_ids
        committed, parameters = list[RequestTokens](), dict[str, Any]()
        for row in rows:
            name, length = names[row], int(lengths[row])
            base = self._lengths.get(name, 0)
            if not 0 < base <= length - len(sampled[row]):
                base, parameters[name] = 0, self._parameters(name)
            committed.append(RequestTokens(name, base, tokens[row, base:length].tolist()))
            self._lengths[name] = length
        try:
            for row, chain in zip(rows, self._drafts.propose(committed, parameters), strict=True):
                proposed[row] = chain
            self._failing = False
        except Exception:  # vLLM would end with it
            if not self._failing:
                log.warning("no candidates until further notice", exc_info=True)
            self._failing = True
            for each in committed:
                self._lengths.pop(each.name)  # what the thread knows of them is uncertain
        return proposed

    def _parameters(self, name: str) -> tuple[SamplingParams, int, int]:
        request = self._runner.requests[name]
        given, prompt = request.sampling_params, request.num_prompt_tokens
        most = self._config.model_config.max_model_len
        sampling = SamplingParams(
            temperature=max(0.0, given.temperature), seed=seed_of(self._config, name, given), top_k=max(0, given.top_k)
        )
        return sampling, prompt, min(most, prompt + (given.max_tokens or most))


def seed_of(config: Any, name: str, sampling: Any) -> int:
    """The request's seed in 64 bits; of one that has none the same in every worker, and another for each request."""
    if sampling.seed is not None:
        return int(sampling.seed) & (1 << 64) - 1
    return int.from_bytes(blake2b(f"{config.instance_id} {name}".encode(), digest_size=8).digest(), "big")


class CoupledDraw(torch.nn.Module):
    """In place of the random draw of vLLM's sampler."""

    def __init__(self, runner: Any, stock: torch.nn.Module) -> None:
        super().__init__()
        self._runner = runner
        self._stock = stock
        self.depths: npt.NDArray[np.int64] | None = None
        """Candidates before each row; None: no row has any."""

    @property
    def requests(self) -> int:
        """Requests of this step; none while vLLM profiles itself."""
        return len(self._runner.input_batch.req_ids)

    def forward(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> Any:
        if len(logits) != self.requests:
            return self._stock(logits, generators, k, p)
        depths = np.zeros(len(logits), np.int64) if self.depths is None else self.depths
        return self.draw(apply_top_k_top_p(logits, k, p), np.arange(len(logits)), depths, None), None

    def draw(self, logits: Tensor, owners: npt.NDArray[np.int64], depths: npt.NDArray[np.int64], greedy: Any) -> Tensor:
        """Processed logits [R, V], each row's request and the candidates before it -> tokens [R]."""
        names, requests = self._runner.input_batch.req_ids, self._runner.requests
        config = self._runner.vllm_config
        seeds = [seed_of(config, name, requests[name].sampling_params) for name in names]
        lengths = self._runner.input_batch.num_tokens_no_spec[: len(names)].astype(np.int64)
        greedy = np.zeros(len(logits), np.bool_) if greedy is None else greedy
        tokens, _ = choose(logits.float(), greedy, np.array(seeds, np.uint64)[owners], lengths[owners] + depths)
        return tokens.clamp_(min=0)  # numbers that are broken are vLLM's affair


class CoupledRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """Emits the target's own choices up to the first that the candidate is not."""

    def __init__(self, sampler: Any, draw: CoupledDraw) -> None:
        super().__init__(sampler)
        self._draw = draw

    def forward(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        counts = np.array(metadata.num_draft_tokens, np.int64)
        if len(counts) != self._draw.requests:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        self._draw.depths = counts
        try:
            bonus = self.sampler(
                logits=logits[metadata.bonus_logits_indices],
                sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1),
                predict_bonus_token=True,
                logprobs_mode_override="raw_logits",
            )
        finally:
            self._draw.depths = None
        raw = logits[metadata.target_logits_indices].float()
        owners = np.repeat(np.arange(len(counts)), counts)
        depths = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        target = self.apply_logits_processors(raw.clone(), sampling_metadata, metadata)
        target, greedy = _sharpened(target, torch.from_numpy(owners).to(logits.device), sampling_metadata)
        choices = bonus.sampled_token_ids.long().repeat(1, metadata.max_spec_len + 1)
        at = tuple(torch.from_numpy(index).to(logits.device) for index in (owners, depths))
        choices[at] = self._draw.draw(target, owners, depths, greedy)
        drafts = torch.full_like(choices, PLACEHOLDER_TOKEN_ID)
        drafts[at] = metadata.draft_token_ids.long()
        accepted = (choices == drafts).cumprod(-1).sum(-1, keepdim=True)
        columns = torch.arange(choices.shape[1], device=logits.device)
        tokens = torch.where(columns <= accepted, choices, PLACEHOLDER_TOKEN_ID).to(torch.int32)
        likely = None
        if (wanted := sampling_metadata.max_num_logprobs) is not None:
            likely = self._get_logprobs_tensors(wanted, metadata, logits, raw, bonus.logprobs_tensors.logprobs, tokens)
        return SamplerOutput(tokens, likely)


def _sharpened(logits: Tensor, owners: Tensor, metadata: Any) -> tuple[Tensor, npt.NDArray[np.bool_]]:
    """Temperature, top-k and top-p of verified rows, and which are greedy. vLLM's own expansion of these parameters
    leaves its output unwritten on a CPU (0.32)."""
    if metadata.all_greedy:
        return logits, np.ones(len(logits), np.bool_)
    temperature = metadata.temperature[owners]
    greedy = temperature < GREEDY
    k, p = (None if each is None else each[owners] for each in (metadata.top_k, metadata.top_p))
    sharp = apply_top_k_top_p(logits / torch.where(greedy, 1.0, temperature)[:, None], k, p)
    return torch.where(greedy[:, None], logits, sharp), greedy.cpu().numpy()


class CoupledWorker(BaseWorker):  # type: ignore[misc]
    """vLLM's worker with the coupled draw; its proposer may be `RemoteProposer`."""

    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        if not runner.sampler.logprobs_mode.startswith("raw"):
            raise ValueError("Slipstream's worker gives log-probabilities of raw logits alone: drop --logprobs-mode.")
        runner.sampler.topk_topp_sampler = draw = CoupledDraw(runner, runner.sampler.topk_topp_sampler)
        runner.rejection_sampler = CoupledRejectionSampler(runner.sampler, draw)
        if isinstance(drafter := getattr(runner, "drafter", None), RemoteProposer):
            drafter.bind(runner, leads=self.rank == 0)

    def execute_model(self, scheduler_output: Any) -> Any:
        if isinstance(drafter := getattr(self.model_runner, "drafter", None), RemoteProposer):
            drafter.finish(scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output)
