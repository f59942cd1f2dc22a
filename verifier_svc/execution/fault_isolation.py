"""Runs steps so that one exception ends neither the verifier nor more sessions than the one that causes it.

A step that raises is run again in halves, and those that raise in halves again. What a failed pass left behind is safe
to run over: it wrote KV rows behind the committed tokens only, which the next pass writes again; what it kept is rolled
back; randomness belongs to positions; a grammar's cursor that failed starts afresh. So a session that is innocent
gets the same tokens as without the fault, within the same step.

A session whose pass fails alone is tried again without candidates, which may be the cause. Between the tries a probe,
one token of no session, finds the cause. If the probe runs, the session ends alone: with ResourceExhausted where
memory was missing, which another verifier may have, else with SESSION_FAULT. If it does not, all sessions left in the
step get STEP_FAILED, with which gateways open them elsewhere or again. After LOST_STEPS such steps in a row EngineLost
ends the verifier.

A session that failed alone and then ran is a suspect: it runs apart until PROVEN_STEPS passes went well. Where memory
was missing, as many steps are run in parts of half the sessions from the start.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter

import torch

from slipstream.engine.engine import EngineLost
from slipstream.errors import (
    CONTROL_FLOW,
    DEVICE_MEMORY,
    SESSION_FAULT,
    STEP_FAILED,
    Internal,
    ResourceExhausted,
    SlipstreamError,
    Unavailable,
)
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from verifier_svc.execution.executor import ScheduledSequence, StepExecutor, StepOutcome
from verifier_svc.session import Session, SessionRequest

log = logging.getLogger(__name__)

LONE_TRIES = 3
"""Passes of a session alone, all failed, that end it."""
PROVEN_STEPS = 16
"""Passes alone after which a suspect runs with others again."""
LOST_STEPS = 5
"""Steps in a row, in the end of which not even the probe ran, that end the verifier."""
KINDS = ("split", "memory", "session", "device")
"""Faults that are counted: a pass of several sessions that was run again in parts; a pass that lacked memory; a session
that was ended; a step in which the probe failed."""
LACKING = ("allocate memory", "out of memory", "Unable to allocate")
"""Words of errors by torch's allocators on CPUs and GPUs, and NumPy's. Of a worker process's exception only the words
arrive."""
_PASSED_ON = (EngineLost, *CONTROL_FLOW)


class FaultIsolation:
    """Runs the steps of an executor, on the model's thread."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._suspects: dict[Session, int] = {}
        """Passes alone that each still has to get through."""
        self.faults = Counter(dict.fromkeys(KINDS, 0))
        self._most_sessions = 0
        """Most sessions of one pass in the next `_narrow_steps` steps."""
        self._narrow_steps = 0
        self._fault: BaseException | None = None
        """The last exception."""
        self._lost_steps = 0
        self._device_lost = False
        """True for the rest of a step in which the probe failed."""
        self._ran = False
        """True once a pass of the step ran."""
        self.undisturbed = True
        """True when the last step took one pass, so that its time is the cost of a step."""

    def run_step(self, step: list[ScheduledSequence]) -> list[StepOutcome]:
        """Returns an outcome for each sequence, in order. Raises EngineLost when no step can run any more."""
        if not self._suspects and not self._narrow_steps:
            try:
                outcomes = self._executor.execute(step)
                self.undisturbed = True
                return outcomes
            except _PASSED_ON:
                raise
            except BaseException as error:
                self._note_fault(error, step)
            return self._run_apart(step, failed=True)
        return self._run_apart(step, failed=False)

    def _run_apart(self, step: list[ScheduledSequence], *, failed: bool) -> list[StepOutcome]:
        """Runs the sequences that are not suspected, whose common pass may have `failed`, then each suspect."""
        self.undisturbed = self._device_lost = self._ran = False
        self._suspects = {session: left for session, left in self._suspects.items() if not session.closed}
        outcomes: dict[Session, StepOutcome] = {}
        together = [each for each in step if each.session not in self._suspects]
        apart = [[each] for each in step if each.session in self._suspects]
        if failed:
            self._split(together, outcomes)
        for group in apart if failed else [*self._parts(together), *apart]:
            self._run(group, outcomes)
        self._lost_steps = self._lost_steps + 1 if self._device_lost else 0
        self.faults["device"] += self._device_lost
        if self._lost_steps >= LOST_STEPS:
            raise EngineLost(f"{LOST_STEPS} steps in a row failed for every session; the verifier ends.")
        return [outcomes[each.session] for each in step]

    def _parts(self, group: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
        """The group, in parts for which there was memory lately."""
        if not self._narrow_steps:
            return [group] if group else []
        self._narrow_steps -= 1
        size = self._most_sessions
        return [group[start : start + size] for start in range(0, len(group), size)]

    def _run(self, group: list[ScheduledSequence], outcomes: dict[Session, StepOutcome]) -> None:
        if self._device_lost:
            outcomes |= {each.session: _step_failed() for each in group}
        elif (found := self._attempt(group)) is None:
            self._split(group, outcomes)
        else:
            outcomes |= {each.session: outcome for each, outcome in zip(group, found, strict=True)}

    def _split(self, group: list[ScheduledSequence], outcomes: dict[Session, StepOutcome]) -> None:
        """Runs a group whose common pass failed."""
        if len(group) == 1:
            outcomes[group[0].session] = self._run_alone(group[0])
            return
        middle = len(group) // 2
        self._run(group[:middle], outcomes)
        self._run(group[middle:], outcomes)

    def _run_alone(self, scheduled: ScheduledSequence) -> StepOutcome:
        """Runs a session again whose pass failed alone."""
        session = scheduled.session
        self._suspects[session] = PROVEN_STEPS
        # The pass may fail for the tokens that were drawn. To drop them for that would bias the ratio rule, which keeps
        # them; without draws nothing is biased.
        if not session.request.sampling.drawn:
            scheduled = scheduled.plain
        for _ in range(LONE_TRIES - 1):
            if not self._probe():
                return _step_failed()
            if (found := self._attempt([scheduled])) is not None:
                return found[0]
        if not self._probe():
            return _step_failed()
        self.faults["session"] += 1
        log.error("a session fails every step it is in and is ended", extra={"session": session.request.id})
        return _blame(self._fault)

    def _attempt(self, group: list[ScheduledSequence]) -> list[StepOutcome] | None:
        """Runs one pass from the state before the step; None when it failed."""
        kv = self._executor.kv
        try:
            for each in group:
                assert each.session.sequence is not None
                kv.rollback(each.session.sequence, each.computed)
                kv.grow(each.session.sequence, each.tokens)
            outcomes = self._executor.execute(group)
        except _PASSED_ON:
            raise
        except BaseException as error:
            self._note_fault(error, group)
            return None
        self._ran = True
        if len(group) == 1 and (left := self._suspects.get(group[0].session)):
            self._prove(group[0].session, left - 1)
        return outcomes

    def _prove(self, session: Session, left: int) -> None:
        if left:
            self._suspects[session] = left
        else:
            del self._suspects[session]

    def _probe(self) -> bool:
        """Runs a pass over one token of no session; False when it fails. Without KV for it, what ran before decides."""
        kv, session = self._executor.kv, _probe_session()
        works = self._ran
        if kv.blocks_free:
            sequence = session.sequence = kv.begin(session.tokens, session.request.cache_salt)
            probe = ScheduledSequence(session, 1, 0, session.tokens, complete=True)
            works = self._attempt([probe]) is not None
            kv.close(sequence)
        self._device_lost = not works
        return works

    def _note_fault(self, error: BaseException, group: list[ScheduledSequence]) -> None:
        log.warning("a step of %d sessions failed; it is run again in parts", len(group), exc_info=error)
        several, memory = len(group) > 1, _lacks_memory(error)
        self.faults["split"] += several
        self.faults["memory"] += memory
        if several and memory:
            self._most_sessions, self._narrow_steps = (len(group) + 1) // 2, PROVEN_STEPS
        traceback.clear_frames(error.__traceback__)  # their tensors are memory that the next try needs
        self._fault = error.with_traceback(None)


def _probe_session() -> Session:
    request = SessionRequest(
        id="probe",
        number=0,
        epoch=0,
        sampling=SamplingParams(temperature=0.0),
        prompt_length=1,
        max_length=2,
        stop_token_ids=frozenset(),
        max_draft_tokens=0,
    )
    return Session(request, tokens=[0], credit=None, tree=CandidateTree([0]), history=None)


def _step_failed() -> Unavailable:
    return Unavailable("the verifier's model cannot run; try another verifier, or this one later.", reason=STEP_FAILED)


def _lacks_memory(fault: BaseException) -> bool:
    if isinstance(fault, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(fault) for words in LACKING)


def _blame(fault: BaseException | None) -> SlipstreamError:
    """The error of a session that fails alone while the probe runs."""
    if isinstance(fault, SlipstreamError):
        return fault
    if fault is not None and _lacks_memory(fault):
        return ResourceExhausted("the verifier's device has too little memory for this session.", reason=DEVICE_MEMORY)
    return Internal("the verifier failed in every step of this session.", reason=SESSION_FAULT)
