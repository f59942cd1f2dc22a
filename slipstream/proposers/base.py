"""The interface of drafting methods: a `Proposer` reads committed tokens and proposes nodes for candidate trees.

A drafter calls it for many sequences in one step and sends the nodes over gRPC; a verifier may call it in its own
process. Proposals are hints: the verifier alone decides which tokens become text. Importing this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from slipstream.engine.model_info import ModelInfo
from slipstream.errors import SlipstreamError
from slipstream.proposers.registry import find_method
from slipstream.speculation.draft_distribution import DraftDistribution
from slipstream.speculation.lookahead_window import LookaheadWindow
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.tokenizer.structured_output import StructuredOutput

if TYPE_CHECKING:
    from slipstream.engine.engine import HiddenStates

ROOT = -1
"""Index of the last committed token wherever a node's index is expected."""
UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HiddenNeed:
    """The target's hidden states that a method reads of committed tokens: behind the last layer, and of `layers`."""

    layers: tuple[int, ...] = ()
    """Numbered as in `slipstream.engine.engine.HiddenRequest`."""
    every_row: bool = False
    """True: of every token that the target computes. False: only of the newest, from which the next one was chosen."""


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """The target's hidden states of the committed tokens number `first`, `first` + 1, ..."""

    first: int
    states: HiddenStates

    @property
    def end(self) -> int:
        """The number of the token after them."""
        return self.first + len(self.states.last)


@dataclass(frozen=True, slots=True)
class DeeperLevels:
    """Budget: what to propose in the same call below the nodes that it proposes."""

    levels: int
    """Most further levels of nodes."""
    expand: int
    """Most nodes expanded in each of them: the likeliest that are not yet."""
    path_log_probs: list[float]
    """[expand of the context] log-probability of the path down to each node that is expanded first."""
    least_log_prob: float
    """Path log-probability that a node must reach to be expanded."""


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """A read-only view of one sequence for one call of `propose`.

    It stays valid while the caller's session goes on changing: `tokens` is only ever appended to.
    """

    handle: Hashable
    """Key of the proposer's own state for the sequence, until `close_sequence`."""
    tokens: list[int]
    """Committed tokens, of which the first `length` count: from call to call the same list, which is only appended to.
    A session that is rolled back or moves is opened again, under another handle."""
    length: int
    """Committed tokens at the time of the call, at least one."""
    prompt_length: int
    max_length: int
    """Most tokens that the sequence will ever have."""
    sampling: SamplingParams
    node_tokens: list[int] = field(default_factory=list)
    """Candidate nodes that are in the tree already, parents before children."""
    parents: list[int] = field(default_factory=list)
    """[nodes] index of each node's parent, or ROOT."""
    expand: list[int] = field(default_factory=list)
    """Nodes, or ROOT, below which new nodes are wanted; empty while a prompt is only being read."""
    max_read_tokens: int = UNLIMITED
    """Budget: most committed tokens to read in this call."""
    max_nodes: int = UNLIMITED
    """Budget: most nodes to propose in this call."""
    deeper: DeeperLevels | None = None
    """None: nodes are proposed below `expand` alone. A method may always leave it at that."""
    cache_salt: str = ""
    """Sequences of different salts share nothing that shows what the other one wrote."""
    tenant: str = ""
    """Opaque name; the slow work of one tenant delays no other's."""
    prediction: tuple[int, ...] = ()
    """Output that the client expects."""
    structured_output: StructuredOutput | None = None
    """The grammar that the output must follow."""
    noise_stream: int = 0
    """Key of the noise with which tokens are drawn under the acceptance rule `rejection`."""
    noise_nodes: list[int] = field(default_factory=list)
    """[expand] number of each expanded node in that stream: draws below different nodes are independent."""

    hidden: tuple[HiddenRows, ...] = ()
    """Rows that came since the last context of the sequence. Tokens that the target found in its prefix cache have
    none. Some may belong to tokens at and behind `length`."""
    vocabulary_size: int = UNLIMITED
    """Columns of the target's logits: nothing from there on is proposed. Models of one tokenizer are padded to
    different sizes, so `tokens` may hold ids that a draft model has no row for, and it may have rows for more."""

    def path(self, node: int) -> list[int]:
        """The candidate tokens from below the root down to `node`; none for ROOT."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.node_tokens[node])
            node = self.parents[node]
        return tokens[::-1]


class ProposedNode(NamedTuple):
    """One more node for a sequence's candidate tree."""

    parent: int
    """ROOT, the index of one of the context's nodes, or `len(context.node_tokens) + i` for proposed node i."""
    token: int
    log_prob: float
    """Confidence: the natural logarithm of the probability, given the parent, that the token will be accepted."""
    distribution: DraftDistribution | None = None
    """Distribution that the token was drawn from; under the rule `rejection` only."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidates that one call proposes for one sequence."""

    nodes: list[ProposedNode]
    """Likeliest first, parents before children; empty until all committed tokens are read."""
    read_tokens: int
    """Committed tokens that the proposer has read; less than the context's length when a budget or room ran out."""
    no_room: bool = False
    """True when the KV cache has no room for the sequence now; call again after any change."""
    levels: int = 1
    """Levels of nodes that were proposed, one below the other."""


class Proposer(Protocol):
    """One drafting method. Not thread-safe: called on one thread only, which `ProposerMethod.needs_model` decides."""

    def propose(self, contexts: list[ProposerContext]) -> list[Proposal | SlipstreamError]:
        """One step for many sequences; one answer for each, in order. A typed error ends that sequence's drafting, and
        costs no other one anything."""
        ...

    def close_sequence(self, handle: Hashable) -> None:
        """Releases what is kept under the handle; harmless for an unknown one."""
        ...


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """Settings of all methods, as `drafter_svc.config.DrafterConfig` explains them; each method reads its own."""

    model: str = ""
    target: str = ""
    """The model whose hidden states a method reads; empty outside a verifier."""
    translate_for: str = ""
    dtype: str = "auto"
    quantisation: str = ""
    lean: bool = True
    device: str = "auto"
    kv_tokens: int = 65_536
    width: int = 4
    sharpness: float = 1.5
    proposal_tokens: int = 32
    corpus_tokens: int = 0
    corpus_salts: int = 16
    corpus_shared: bool = False
    lookahead: str = "4,3,3"
    engine: str = "embedded"
    vllm_args: str = ""
    step_tokens: int = 512
    threads: int = 1


@dataclass(frozen=True, slots=True)
class OpenedProposer:
    model: ModelInfo
    """The model that drafts, with the vocabulary of the targets it can draft for."""
    proposer: Proposer
    hidden: HiddenNeed | None = None
    """Hidden states of the target that it reads; None for none."""
    depth: int = UNLIMITED
    """Most tokens beyond the committed ones that it can propose."""
    accuracy: Callable[[list[int], HiddenStates, list[int]], float] | None = None
    """Share of places in a text of the target where the method's likeliest next token is the target's own. Takes the
    tokens, the hidden states of all of them, and the target's likeliest token behind each."""
    open_window: Callable[[Hashable, list[int], frozenset[int]], LookaheadWindow] | None = None
    """The window that runs along in the target's passes, for a sequence's handle, tokens and end tokens."""
    expands: int = UNLIMITED
    """Most nodes of one sequence that a call expands."""


def open_proposer(method: str, settings: ProposerSettings) -> OpenedProposer:
    """Opens a registered method; to be called on the thread that will use it.

    Raises InvalidArgument for an unknown method, and what the method's factory raises (for a draft model what
    `slipstream.engine.factory.open_engine` does).
    """
    module, _, function = find_method(method).factory.partition(":")
    opened: OpenedProposer = getattr(import_module(module), function)(settings)
    return opened


def propose_each(
    contexts: list[ProposerContext], propose: Callable[[int, ProposerContext], Proposal]
) -> list[Proposal | SlipstreamError]:
    """One answer for each context, called with its index: what is raised is that sequence's answer."""
    answers: list[Proposal | SlipstreamError] = []
    for index, context in enumerate(contexts):
        try:
            answers.append(propose(index, context))
        except SlipstreamError as error:
            answers.append(error)
    return answers


def any_vocabulary(method: str) -> ModelInfo:
    """The model that a method without one announces: an empty fingerprint fits every target."""
    return ModelInfo(
        name=method,
        revision="",
        vocabulary_size=UNLIMITED,
        fingerprint="",
        max_length=UNLIMITED,
        dtype="none",
        parameters=0,
        eos_token_ids=(),
    )
