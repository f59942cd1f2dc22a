"""A frame of candidates, read from the wire. What a drafter sends is untrusted, so sizes are looked at before anything
is copied: a message of 4 MiB can claim a million nodes, and the event loop must not pay for them."""

from __future__ import annotations

from slipstream import proposal, wire
from slipstream.errors import InvalidArgument
from slipstream.frame import Frame, Limits, check
from slipstream.proposal import Proposal
from slipstream.v1 import types_pb2


def read(candidates: types_pb2.Candidates, source: int, vocabulary_size: int, limits: Limits) -> Frame:
    """Raises InvalidArgument for what no correct drafter sends."""
    sizes = (candidates.token_ids, candidates.confidences, candidates.parents, candidates.distributions)
    if max(map(len, sizes)) > limits.frame_nodes:
        raise InvalidArgument(f"a frame holds more than {limits.frame_nodes} nodes; send fewer.")
    if any(max(len(q.token_ids), len(q.weights)) > proposal.MAX_TOKENS for q in candidates.distributions):
        raise InvalidArgument(f"a distribution has at most {proposal.MAX_TOKENS} tokens.")
    frame = check(_frame(candidates, source), vocabulary_size, limits)
    for distribution in frame.distributions:
        if distribution is not None:
            proposal.check(distribution, vocabulary_size)
    return frame


def _frame(candidates: types_pb2.Candidates, source: int) -> Frame:
    return Frame(
        base_length=candidates.base_length,
        generation=candidates.generation,
        first_node=candidates.first_node,
        token_ids=tuple(candidates.token_ids),
        log_probs=wire.confidences_from_wire(candidates.confidences),
        parents=tuple(candidates.parents),
        distributions=tuple(Proposal(tuple(q.token_ids), tuple(q.weights)) for q in candidates.distributions),
        source=source,
    )
