"""The one table of drafting methods: command line, configuration, routing and metrics read it.

How to add a drafting method:

1. Write one file here with a factory `open_proposer(settings: ProposerSettings) -> OpenedProposer`. A method that needs
   nothing but the sequence's tokens implements `slipstream.proposers.lookup.Text` and returns a `LookupProposer`, which
   brings chains, budgets and closing: `LookaheadText` in `lookahead.py` is forty lines. Any other method
   is a class with `propose` and `close_sequence` (`slipstream.proposers.base.Proposer`), as in `test_registry.py`.
2. Add one row to METHODS below. `slipstream serve --drafter NAME` follows from it, and `DRAFTER_METHOD=NAME` for a
   process of its own. Inside a verifier it is `VERIFIER_LOCAL_DRAFTERS=NAME` (`NAME=FOLDER` with a model), which
   gateways call `verifier:NAME`. A method without a model has about four calls before each step there: propose chains.
3. Test it: `tests/unit/slipstream/proposers/test_NAME.py`, and the lists of methods in
   `tests/integration/test_local_drafters.py`: as a process, and inside a verifier.

A method that reads the target's hidden states runs inside a verifier alone. Its row has `needs_hidden_states`, and its
factory returns what it reads, `OpenedProposer(hidden=HiddenNeed(...))`. It is called once for each root, when the rows
up to the token before it have come (`context.hidden`), and returns the whole tree. `medusa.py` is one to copy, `Reader`
in `tests/integration/test_hidden_rows.py` the shortest; its test is `KINDS` in `tests/integration/test_heads.py`.

A setting of the method's own is a field of `ProposerSettings`, and of `DrafterConfig` or `VerifierConfig`, whose
`proposer_settings` passes it on.

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
    """True for a method with a model, which `DRAFTER_MODEL` must name. In a verifier it has a thread of its own; one
    without a model runs on the event loop there and must answer within microseconds."""
    needs_hidden_states: bool = False
    """True for a method that reads the target's hidden states."""
    needs_target_passes: bool = False
    """True for a method whose own rows run in the target's passes."""
    needs_prediction: bool = False
    """True for a method that can propose only for requests that carry a prediction."""
    gives_distribution: bool = False
    """True for a method that can send the distribution its tokens were drawn from, which `rejection` needs."""

    @property
    def compares_tokenizers(self) -> bool:
        """Whether its model has a tokenizer, which must be the target's unless it translates."""
        return self.needs_model and not self.needs_hidden_states

    @property
    def in_verifier_only(self) -> bool:
        return self.needs_hidden_states or self.needs_target_passes


IN_VERIFIER = "verifier:"
"""In place of an address: before the method of a drafter that runs inside the verifiers."""
SPECULATOR = "speculator"
"""The method of vLLM's own speculator in a verifier on vLLM. It has no row: VERIFIER_VLLM_SPECULATOR opens it in the
target's workers, and no other process can have it."""
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
        ProposerMethod("ngram", "slipstream.proposers.suffix:open_proposer", "another name of `suffix`"),
        ProposerMethod("suffix", "slipstream.proposers.suffix:open_proposer", "suffix automaton"),
        ProposerMethod(
            "prediction",
            "slipstream.proposers.predicted_output:open_proposer",
            "the output that the client expects",
            needs_prediction=True,
        ),
        ProposerMethod(
            "lookahead",
            "slipstream.proposers.lookahead:open_proposer",
            "n-grams that the target guesses in its own passes",
            needs_target_passes=True,
        ),
        ProposerMethod(
            "medusa",
            "slipstream.proposers.medusa:open_proposer",
            "heads on the target's last hidden state",
            needs_model=True,
            needs_hidden_states=True,
            gives_distribution=True,
        ),
        ProposerMethod(
            "eagle",
            "slipstream.proposers.eagle:open_proposer",
            "a draft layer on the target's hidden states (EAGLE-1, EAGLE-2, EAGLE-3)",
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
