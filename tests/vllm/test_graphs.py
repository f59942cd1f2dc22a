"""Which CUDA graph a step would replay, by vLLM's own choice among those that it would capture; none is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.segment import KVSequence, Segment
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.vllm.messages import Graphs, SampledStep, SessionParameters
from verifier_svc.execution.vllm.requests import NO_TOKEN, RequestStep, WorkerRequests

LONGEST = 8
SEQUENCES = 16
SIZES = [1, 2, 4, *range(8, 257, 8)]


class Speculation:
    """As much of vLLM's configuration as is read."""

    num_speculative_tokens_per_batch_size: Any = None

    def uses_dynamic_speculative_decoding(self) -> bool:
        return self.num_speculative_tokens_per_batch_size is not None


def configuration() -> Any:
    return SimpleNamespace(
        speculative_config=Speculation(),
        num_speculative_tokens=LONGEST,
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )


def managed(monkeypatch: pytest.MonkeyPatch, mode: str, uneven: str) -> tuple[Any, Any]:
    """A runner, and its manager after a capture."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    from verifier_svc.execution.vllm.runner import StepRunner

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(current_platform, "get_global_graph_pool", lambda: None, raising=False)
    monkeypatch.setattr(StepRunner, "_uneven", lambda self, config: uneven)
    runner = StepRunner.__new__(StepRunner)
    runner.decode_query_len = 1 + LONGEST
    options = {"decode_query_len": 1 + LONGEST, "varlen_decode": False}
    config = configuration()
    manager = runner._graph_manager(config, torch.device("cpu"), CUDAGraphMode[mode], **options)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None
    manager._graphs_captured = True
    return runner, manager


def dispatched(manager: Any, chains: list[int], *, reads_prompt: bool = False) -> str:
    """How a step of these chains runs, as the runner asks."""
    rows = [1 + each for each in chains]
    uniform = rows[0] if len(set(rows)) == 1 and not reads_prompt else None
    longest = None if reads_prompt else max(rows)
    found = manager.dispatch(len(rows), sum(rows), uniform, 0, max_query_len=longest)
    return str(found.cg_mode.name)


def test_chains_of_any_lengths_are_one_full_graph_where_the_attention_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, manager = managed(monkeypatch, "FULL_AND_PIECEWISE", uneven="")
    assert (runner.graphs.path, runner.graphs.notice, runner.graphs.lengths) == ("full", "", ())
    for chains in ([0], [8], [0, 3, 8], [1] * SEQUENCES, [8] * SEQUENCES, [0, 8] * 8):
        assert dispatched(manager, chains) == "FULL", chains
    assert dispatched(manager, [0, 3, 8], reads_prompt=True) == "PIECEWISE"


def test_where_attention_needs_equal_lengths_padded_chains_are_one_full_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, manager = managed(monkeypatch, "FULL_AND_PIECEWISE", uneven="FLASH_ATTN")
    assert runner.graphs.path == "padded" and runner.graphs.lengths == (0, 1, 2, 4, 8)
    assert "FLASH_ATTN" in runner.graphs.notice and "0, 1, 2, 4, 8" in runner.graphs.notice
    for length in runner.graphs.lengths:
        for sessions in range(1, 1 + SEQUENCES):
            assert dispatched(manager, [length] * sessions) == "FULL", (length, sessions)
    assert dispatched(manager, [0, 3, 8]) == "PIECEWISE"


@pytest.mark.parametrize(("mode", "path"), [("PIECEWISE", "piecewise"), ("NONE", "eager")])
def test_a_model_without_full_cuda_graphs_reports_it(monkeypatch: pytest.MonkeyPatch, mode: str, path: str) -> None:
    runner, _ = managed(monkeypatch, mode, uneven="")
    assert runner.graphs.path == path and f"no full CUDA graphs for this model ({mode})" in runner.graphs.notice


def test_eager_passes_that_the_operator_chose_cause_no_warning() -> None:
    from vllm.config import CUDAGraphMode

    from verifier_svc.execution.vllm.runner import graphs_of

    asked = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    assert graphs_of(asked, CUDAGraphMode.NONE, "", LONGEST) == ("eager", "", ())


def test_lengths_are_powers_of_two_up_to_the_longest_chain() -> None:
    from vllm.config import CUDAGraphMode

    from verifier_svc.execution.vllm.runner import graphs_of

    for longest, lengths in ((1, (0, 1)), (4, (0, 1, 2, 4)), (6, (0, 1, 2, 4, 6))):
        graphs = graphs_of(configuration(), CUDAGraphMode.FULL_AND_PIECEWISE, "FLASH_ATTN", longest)
        assert graphs.lengths == lengths


# What is sent to the workers.

PLAIN = SessionParameters(SamplingParams(temperature=0.0), 1)


class Bench:
    """Requests of two sequences of 20 tokens, of which all but the last have KV."""

    def __init__(self, *lengths: int, step_tokens: int = 64, blocks: int = 8, places: int = 4) -> None:
        graphs = Graphs("padded", lengths=lengths)
        self.requests = WorkerRequests(BlockPool(blocks, 16), 1024, places, step_tokens, graphs)
        self.tokens = {sequence: list(range(20)) for sequence in (self.begin(), self.begin())}
        self.sequences = list(self.tokens)
        self.run([(sequence, self.tokens[sequence][:19], []) for sequence in self.sequences], decided=0)

    def begin(self) -> KVSequence:
        return self.requests.kv.begin((), "salt")

    def schedule(self, step: list[tuple[KVSequence, list[int], list[int]]]) -> Any:
        """Pending tokens and candidates of each."""
        given = []
        for sequence, pending, chain in step:
            self.requests.kv.grow(sequence, len(pending) + len(chain))
            segment = Segment(sequence, pending, chain, list(range(-1, len(chain) - 1)))
            given.append(RequestStep(segment, self.tokens[sequence], lambda: PLAIN))
        self._step = given
        return self.requests.schedule(given)

    def run(self, step: list[tuple[KVSequence, list[int], list[int]]], decided: int) -> Any:
        """The workers decide so many tokens of each, of which all but the last are candidates."""
        output = self.schedule(step)
        names = [self.requests.name_of(each.segment.sequence) for each in self._step]
        self.requests.step_succeeded(self._step, SampledStep({name: [7] * decided for name in names}))
        for each in self._step:
            self.requests.kv.keep(each.segment, list(range(decided - 1)))
            self.tokens[each.segment.sequence] += [7] * decided
        return output

    def names(self) -> list[str]:
        return [self.requests.name_of(sequence) for sequence in self.sequences]


def test_the_chains_of_a_step_are_padded_to_one_length() -> None:
    bench = Bench(0, 1, 2, 4, 8)
    first, second = bench.sequences
    output = bench.schedule([(first, [19], [1, 2, 3]), (second, [19], [])])
    one, two = bench.names()
    assert output.scheduled_spec_decode_tokens == {one: [1, 2, 3, NO_TOKEN], two: [NO_TOKEN] * 4}
    assert output.num_scheduled_tokens == {one: 5, two: 5}


@pytest.mark.parametrize(
    ("lengths", "step_tokens", "blocks", "pending"),
    [((), 64, 8, 1), ((0, 1, 2, 4, 8), 9, 8, 1), ((0, 1, 2, 16), 64, 4, 1), ((0, 1, 2, 4, 8), 64, 8, 2)],
    ids=["no graphs", "the step would be too large", "no KV is left", "a prompt is read"],
)
def test_chains_stay_as_they_are_without_need_or_room(
    lengths: tuple[int, ...], step_tokens: int, blocks: int, pending: int
) -> None:
    bench = Bench(*lengths, step_tokens=step_tokens, blocks=blocks)
    first, second = bench.sequences
    bench.tokens[second] += [5] * (pending - 1)
    output = bench.schedule([(first, [19], [1, 2, 3]), (second, [19, 5][:pending], [])])
    one, two = bench.names()
    assert output.scheduled_spec_decode_tokens == {one: [1, 2, 3]}
    assert output.num_scheduled_tokens == {one: 4, two: pending}


def test_a_request_with_fewer_kept_than_sampled_tokens_is_rewound() -> None:
    bench = Bench()
    first = bench.sequences[0]
    bench.run([(first, [19], [7, 7])], decided=3)
    name = bench.requests.name_of(first)
    del bench.tokens[first][21:]
    first.length = 20  # as if the candidates had not been kept
    output = bench.schedule([(first, [7], [])])
    assert output.rewound == [(name, 20, 21, 7)] and not output.scheduled_new_reqs
    assert bench.requests.name_of(first) == name


def test_a_request_that_the_workers_cannot_go_on_with_is_sent_anew() -> None:
    bench = Bench()
    first = bench.sequences[0]
    name = bench.requests.name_of(first)
    bench.tokens[first] += [5]  # which no worker decided
    output = bench.schedule([(first, [19, 5], [])])
    (new,) = output.scheduled_new_reqs
    assert (new.prefill_token_ids, new.num_computed_tokens) == ([*range(20), 5], 19)
    assert output.finished_req_ids == {name} and not output.rewound


def test_those_that_waited_longest_make_room_for_others() -> None:
    bench = Bench(places=3)
    first, second = bench.sequences
    one, two = bench.names()
    bench.run([(first, [19], [])], decided=1)
    others = [bench.begin(), bench.begin()]
    bench.tokens |= {each: [1, 2] for each in others}
    output = bench.run([(each, [1], []) for each in others], decided=0)
    assert output.finished_req_ids == {two}
    output = bench.schedule([(second, [19], [])])
    assert output.finished_req_ids == {one} and [each.req_id for each in output.scheduled_new_reqs] != [two]
