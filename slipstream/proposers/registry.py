"""The one table of drafting methods: command line, configuration, routing and metrics read it.

How to add a drafting method:

1. Write one file here: a class that has `propose` and `close_sequence` (`slipstream.proposers.base.Proposer`), and a
   factory `open_proposer(settings: ProposerSettings) -> OpenedProposer`. Where the method looks a text up, implement
   `slipstream.proposers.lookup.Text` instead and return a `LookupProposer`: `NgramText` at the end of `ngram.py` is
   twenty lines. The whole of a proposer that is no lookup is `LastTokenProposer` in its test, `test_registry.py`.
2. Add one row to METHODS below.

That is all: `slipstream serve --drafter NAME`, `DRAFTER_METHOD=NAME` and the gateway's routing follow from the row.
This module imports no method, so that a gateway can read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ProposerMethod:
    """One row: a method's name, where its factory is, and what it needs and gives."""

    name: str
    factory: str
    """`module:function`, imported when the method is opened."""
    description: str
    needs_model: bool = False
    """Whether `DRAFTER_MODEL` must name a draft model."""
    needs_hidden_states: bool = False
    """True for a method that reads the target's hidden states, so that it can run inside a verifier only."""
    needs_prediction: bool = False
    """True for a method that can propose only for requests that carry a prediction."""
    gives_distribution: bool = False
    """True for a method that can send the distribution its tokens were drawn from, which `rejection` needs."""


IN_VERIFIER = "verifier:"
"""In place of an address: before the method of a drafter that runs inside the verifiers."""
METHODS: dict[str, ProposerMethod] = {
    method.name: method
    for method in (
        ProposerMethod(
            "model",
            "slipstream.proposers.model_factory:open_proposer",
            "a small language model",
            needs_model=True,
            gives_distribution=True,
        ),
        ProposerMethod("ngram", "slipstream.proposers.ngram:open_proposer", "prompt lookup"),
        ProposerMethod("suffix", "slipstream.proposers.suffix:open_proposer", "suffix automaton"),
        ProposerMethod(
            "prediction",
            "slipstream.proposers.predicted_output:open_proposer",
            "the output that the client expects",
            needs_prediction=True,
        ),
        ProposerMethod(
            "medusa",
            "slipstream.proposers.medusa:open_proposer",
            "heads on the target's last hidden state",
            needs_model=True,
            needs_hidden_states=True,
            gives_distribution=True,
        ),
    )
}


def find_method(name: str) -> ProposerMethod:
    """Raises InvalidArgument for a name that is not registered."""
    if name not in METHODS:
        raise InvalidArgument(f"DRAFTER_METHOD={name!r}; choose {', '.join(METHODS)}.")
    return METHODS[name]


def gives_distribution(name: str) -> bool:
    """False for methods of drafters newer than this table, too."""
    return name in METHODS and METHODS[name].gives_distribution


def needs_prediction(name: str) -> bool:
    """False for methods of drafters newer than this table, too."""
    return name in METHODS and METHODS[name].needs_prediction


def method_in_verifier(address: str) -> str:
    """The method of a drafter that runs inside the verifiers, which gateways name `verifier:METHOD`; empty for the
    address of a worker. A host may be called `verifier`: its port is a number, which no method's name is."""
    name = address.removeprefix(IN_VERIFIER)
    return name if name != address and not name.isdecimal() else ""
