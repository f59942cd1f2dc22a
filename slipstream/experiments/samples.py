"""An experiment's samples of several gateways, merged."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import FailedPrecondition
from slipstream.v1 import gateway_pb2


def merge(parts: Sequence[gateway_pb2.GetExperimentResponse]) -> gateway_pb2.GetExperimentResponse:
    """Merges exactly what one gateway would have sampled: a gateway that dropped sessions kept those of lowest
    priority, so below the smallest of these gateways' highest priorities nothing is missing. Raises FailedPrecondition
    for different experiments."""
    first = parts[0]
    for other in parts[1:]:
        if (other.name, other.arms_setting) != (first.name, first.arms_setting):
            raise FailedPrecondition(
                f"the gateways run different experiments, {first.name} ({first.arms_setting}) and {other.name} "
                f"({other.arms_setting}); compare those of one.",
                reason="EXPERIMENTS_DIFFER",
            )
    arms = [_merged([part.arms[index] for part in parts]) for index in range(len(first.arms))]
    return gateway_pb2.GetExperimentResponse(name=first.name, arms_setting=first.arms_setting, arms=arms)


def _merged(parts: Sequence[gateway_pb2.ExperimentArm]) -> gateway_pb2.ExperimentArm:
    cut = [max(sample.priority for sample in part.samples) for part in parts if 0 < len(part.samples) < part.finished]
    known = {sample.priority: sample for part in parts for sample in part.samples}
    kept = [known[priority] for priority in sorted(known) if not cut or priority <= min(cut)]
    return gateway_pb2.ExperimentArm(
        name=parts[0].name,
        begun=sum(part.begun for part in parts),
        finished=sum(part.finished for part in parts),
        samples=kept,
    )
