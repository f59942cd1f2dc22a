"""Opens the drafters that run inside the verifier (`VERIFIER_LOCAL_DRAFTERS`, and the executor's own) and refuses those
that do not fit its target: of another vocabulary, or heads that were trained for another model.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from slipstream.engine.model_thread import ModelThread
from slipstream.errors import FailedPrecondition
from slipstream.proposers.base import OpenedProposer, open_proposer
from slipstream.proposers.expansion import FEWEST, measured_expansion
from slipstream.proposers.registry import METHODS
from slipstream.rpc import proto_conversion
from slipstream.tokenizer.vocabulary import share_vocabulary
from verifier_svc.config import VerifierConfig
from verifier_svc.execution.executor import StepExecutor
from verifier_svc.sources.candidate_sources import CandidateSources
from verifier_svc.sources.local import LocalSource
from verifier_svc.sources.speculator import SpeculatorSource

log = logging.getLogger(__name__)

OWN_TEXTS, OWN_LENGTH = 16, 32
"""Texts that a target writes at the start to try a head on, and tokens of each. Many short ones show more than few long
ones in the same time: of 4 texts of 64 tokens a head for SmolLM2 finds 27 to 41 %, with its layers in another order 19
to 29 % (`python -m benchmarks.head_floor`)."""
GOOD_ACCURACY = 0.3
"""Share of the target's next tokens below which a head is worth a warning."""


@asynccontextmanager
async def local_drafters(
    config: VerifierConfig, sources: CandidateSources, executor: StepExecutor, target: ModelThread
) -> AsyncIterator[None]:
    """Opens the configured proposers and adds them to the verifier's sources; a draft model gets a thread of its own.
    `target` is the thread of the executor's model.

    Raises FailedPrecondition for a draft model with another vocabulary and for hidden states that the target does not
    return, and what the method's factory raises.
    """
    if executor.draft_feed is not None:
        sources.add_local(SpeculatorSource(executor.draft_feed, sources.context))
    async with AsyncExitStack() as stack:
        for name, model in config.local_methods().items():
            method, settings = METHODS[name], config.proposer_settings(model)
            thread = ModelThread(1, f"draft-{name}") if method.needs_model else None
            if thread is None:
                opened = open_proposer(name, settings)
            else:
                await stack.enter_async_context(thread)
                opened = await thread.run(open_proposer, name, settings)
            context = sources.context
            if not share_vocabulary(proto_conversion.model_to_proto(opened.model), context.target):
                raise FailedPrecondition(
                    f"draft model {model} has another vocabulary than the target {context.target.name}; choose a pair "
                    "with one tokenizer, or set VERIFIER_DRAFT_TRANSLATE.",
                    reason="VOCABULARY_MISMATCH",
                )
            if opened.hidden is not None:
                await _check_hidden(name, opened, executor, target, config.min_head_accuracy)
            expand = FEWEST
            if thread is not None and opened.hidden is None:
                expand = await thread.run(measured_expansion, opened.proposer)
            sources.add_local(LocalSource(method, opened, context, thread, executor.hidden_feed, expand))
        yield


async def _check_hidden(
    name: str, opened: OpenedProposer, executor: StepExecutor, target: ModelThread, floor: float
) -> None:
    """Raises FailedPrecondition where the executor's target returns no such hidden states, and for a head that knows
    less than `floor` of what the target writes itself."""
    feed, need = executor.hidden_feed, opened.hidden
    if feed is None or need is None:
        raise FailedPrecondition(
            f"the drafter {name} reads the target's hidden states; use VERIFIER_ENGINE=embedded, or another drafter.",
            reason="HIDDEN_STATES_MISSING",
        )
    if opened.accuracy is None or not floor:
        await target.run(feed.check, need)
        return
    start = next(iter(executor.model.eos_token_ids), 0)
    texts = await target.run(feed.write_texts, need, start, OWN_TEXTS, OWN_LENGTH)
    share = sum(opened.accuracy(text.tokens, text.states, text.chosen) for text in texts) / len(texts)
    finding = (
        f"the drafter {name} finds {share:.0%} of the target's likeliest next tokens in texts of the target's own"
        + (f", reading the layers {list(need.layers)}" if need.layers else "")
    )
    if share < floor:
        raise FailedPrecondition(
            f"{finding}: the head is not trained, or for another target, or its layers are numbered otherwise "
            "(eagle_aux_hidden_state_layer_ids). VERIFIER_MIN_HEAD_ACCURACY=0 serves it all the same.",
            reason="HEAD_UNFIT",
        )
    log.log(logging.WARNING if share < GOOD_ACCURACY else logging.INFO, "%s", finding)
