"""A frame of candidates, read from the wire. What a drafter sends is untrusted, so sizes are looked at before anything
is copied: a message of 4 MiB can claim a million nodes, and the event loop must not pay for them."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import InvalidArgument
from slipstream.rpc import proto_conversion
from slipstream.speculation import draft_distribution
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.frame import Frame, TreeLimits, check
from slipstream.v1 import types_pb2


def read(candidates: types_pb2.Candidates, source: int, vocabulary_size: int, limits: TreeLimits) -> Frame:
    """Raises InvalidArgument for what no correct drafter sends."""
    # Every look at a field makes an object: frames of one node come by the thousand.
    token_ids, parents, confidences = candidates.token_ids, candidates.parents, candidates.confidences
    distributions = candidates.distributions
    if max(len(token_ids), len(parents), len(confidences), len(distributions)) > limits.frame_nodes:
        raise InvalidArgument(f"a frame holds more than {limits.frame_nodes} nodes; send fewer.")
    read = Frame(
        base_length=candidates.base_length,
        generation=candidates.generation,
        first_node=candidates.first_node,
        token_ids=tuple(token_ids),
        log_probs=proto_conversion.confidences_from_wire(confidences),
        parents=tuple(parents),
        distributions=_proposals(distributions) if distributions else (),
        source=source,
    )
    frame = check(read, vocabulary_size, limits)
    for distribution in frame.distributions:
        if distribution is not None:
            draft_distribution.check(distribution, vocabulary_size)
    return frame


def _proposals(distributions: Iterable[types_pb2.Distribution]) -> tuple[DraftDistribution, ...]:
    proposals: list[DraftDistribution] = []
    for q in distributions:
        if max(len(q.token_ids), len(q.weights)) > draft_distribution.MAX_TOKENS:
            raise InvalidArgument(f"a distribution has at most {draft_distribution.MAX_TOKENS} tokens.")
        proposals.append(DraftDistribution(tuple(q.token_ids), tuple(q.weights)))
    return tuple(proposals)
