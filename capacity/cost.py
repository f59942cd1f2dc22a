"""Seconds of a pass: a line, or a table that a model was measured to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import grpc
import numpy as np

from capacity.gpus import gpu_cost
from capacity.names import refuse_unknown
from slipstream.engine.emulated.model import LinearCost
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.rpc import VERIFIER
from slipstream.rpc.channel import dialer, error_of, parsed
from slipstream.rpc.tls import certificates_from_env
from slipstream.tokenizer.vocabulary import check_folder
from slipstream.v1 import worker_pb2, worker_pb2_grpc


class Cost(Protocol):
    """Seconds of one pass over so many tokens of so many sessions."""

    def __call__(self, tokens: int, sessions: int) -> float: ...


@dataclass(frozen=True)
class Table:
    """`seconds[i][j]` of `tokens[j]` tokens of `sessions[i]` sessions (ascending): what `slipstream plan --measure`
    writes. Linear between them; proportional to tokens beyond the last, and as for the nearest row of sessions."""

    tokens: Sequence[int]
    sessions: Sequence[int]
    seconds: Sequence[Sequence[float]]
    _rows: dict[int, tuple[float, ...]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        ascending = all(list(axis) == sorted(set(axis)) and axis for axis in (self.tokens, self.sessions))
        shaped = [len(row) for row in self.seconds] == [len(self.tokens)] * len(self.sessions)
        if not (ascending and shaped and all(second > 0.0 for row in self.seconds for second in row)):
            raise InvalidArgument(
                "a cost table has ascending tokens and sessions, and of each row of sessions the seconds, above 0, of "
                "each number of tokens; write it with `slipstream plan --measure`."
            )

    def __call__(self, tokens: int, sessions: int) -> float:
        row = self._row(sessions)
        return row[tokens] if tokens < len(row) else row[-1] * tokens / (len(row) - 1)

    def _row(self, sessions: int) -> tuple[float, ...]:
        """Seconds of 0 .. the last number of tokens."""
        row = self._rows.get(sessions)
        if row is None:
            above = min(bisect_right(self.sessions, sessions), len(self.sessions) - 1)
            below = max(0, above - 1)
            width = self.sessions[above] - self.sessions[below]
            share = min(max((sessions - self.sessions[below]) / width, 0.0), 1.0) if width else 0.0
            mixed = (1.0 - share) * np.array(self.seconds[below]) + share * np.array(self.seconds[above])
            row = tuple(np.interp(np.arange(self.tokens[-1] + 1), self.tokens, mixed).tolist())
            self._rows[sessions] = row
        return row


def read_cost(value: Mapping[str, object], where: str = "a cost") -> Cost:
    """Raises InvalidArgument for what is neither a line, a table nor a model on a GPU."""
    if "gpu" in value:
        return gpu_cost(value, where)
    kind = Table if "seconds" in value else LinearCost
    refuse_unknown(where, value, [each.name for each in fields(kind) if each.init and not each.name.startswith("_")])
    try:
        return kind(**value)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidArgument(
            f"{where} has base_s, per_token_s, per_session_s and free_tokens, or gpu, parameters and layers, or is a "
            f"table of tokens, sessions and seconds: {error}."
        ) from error


STEP_TOKENS = 512
ASK_S = 10.0


def measured(model: str, dtype: str, quantisation: str, device: str, seconds: float) -> Mapping[str, Sequence[object]]:
    """The fields of a `Table`; `model` as `slipstream.engine.factory` names it, a target or a draft model."""
    check_folder(model)
    # Loads transformers, which a plan does without.
    from slipstream.engine.factory import open_engine
    from verifier_svc.estimators.cost_curve import BUCKETS, CostCurve
    from verifier_svc.estimators.cost_measurement import SESSIONS, measure

    curve = CostCurve()
    engine = open_engine(model, dtype, quantisation=quantisation, device=device)
    measure(curve, engine, STEP_TOKENS, seconds)
    return _fields(BUCKETS, SESSIONS, curve.rows(SESSIONS))


def shape(model: str) -> tuple[int, int, int]:
    """Parameters, layers, and parameters of the output layer of a model's folder or hub id; weights are not read.
    Raises as `slipstream.engine.models.checkpoint.describe_checkpoint`."""
    check_folder(model)
    # Loads transformers, which a plan does without.
    from slipstream.engine.models.checkpoint import model_without_weights

    empty = model_without_weights(model)
    config = empty.config.get_text_config(decoder=True)
    head = empty.get_output_embeddings().weight.numel()
    embedded = 0 if config.tie_word_embeddings else empty.get_input_embeddings().weight.numel()
    # A token reads one row of its embeddings, and the whole output layer.
    return empty.num_parameters() - embedded, config.num_hidden_layers, head


async def measured_by(verifier: str) -> Mapping[str, Sequence[object]]:
    """The fields of a `Table` as this running verifier, HOST:PORT, has measured it so far, start and service together.
    Raises FailedPrecondition for a worker that verifies nothing, and the typed error of a call that fails."""
    async with dialer(VERIFIER, certificates_from_env())(verifier) as line:
        call = worker_pb2_grpc.WorkerServiceStub(line).GetModel(worker_pb2.GetModelRequest(), timeout=ASK_S)
        try:
            costs = parsed(await call).costs
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
    if not costs.seconds:
        raise FailedPrecondition(f"{verifier} is no verifier that knows what its steps cost.", reason="NO_COSTS")
    width, seconds = len(costs.tokens), list(costs.seconds)
    rows = [seconds[start : start + width] for start in range(0, len(seconds), max(1, width))]
    return _fields(list(costs.tokens), list(costs.sessions), rows)


def _fields(
    tokens: Sequence[int], sessions: Sequence[int], rows: Sequence[Sequence[float]]
) -> Mapping[str, Sequence[object]]:
    """Raises InvalidArgument for what is no table."""
    table = Table(tokens, sessions, [[round(second, 7) for second in row] for row in rows])
    return {"tokens": table.tokens, "sessions": table.sessions, "seconds": table.seconds}
