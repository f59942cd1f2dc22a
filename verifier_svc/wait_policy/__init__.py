"""The rules by which a step waits for candidates and drafters send them; imports nothing else of the verifier.

**Why a step waits.** `Scheduler.run` plans a step and asks `Planner.hold_s` for how many seconds to hold it back. It
plans again when they are over, or as soon as anything arrives. A step is held back for one of these:

1. **Masks.** A session's grammar computes masks, and its latest ones took little time: up to `WORTH_S` (5 ms) after
   that began (`GrammarConstraint.worth_waiting_s`). A session without the mask of its next token is in no step
   meanwhile.
2. **Candidates**, where no session of the step has a prompt to compute. Sessions count that may have candidates
   (`Session.draft_limit`: the request's limit, and what its length and credit leave) and have a source from which some
   are due (`CandidateSources.awaited`: its link is up, and drafting is not paused for the session; a lookup's come at
   once and are never awaited). `WaitPolicy.hold_s` adds
   up the tokens that they would gain (`WaitPolicy.expected_gain`) by when (`DelayDistribution.expected`, measured), and
   `wait_time.wait_s` weighs them against those that all sessions lose by the delay.
3. **A head's proposal whose time is unknown** (`DelayDistribution.unknown`), if its gain is positive: for one step's
   time, to measure it.

Waits for 2 and 3 end after `VERIFIER_MAX_WAIT_S`, MAX_WAIT_STEPS (2) steps, or the time that other tenants' shares
leave (`StepPlan.limit_s`), whichever comes first; waits for masks MOST_MASKS_S (50 ms) after `VERIFIER_MAX_WAIT_S`.
With `VERIFIER_ALWAYS_SPECULATE` a step waits up to `VERIFIER_MAX_WAIT_S` for first candidates, and for a head that
proposes more, whether that pays or not.

Where no session can run (none has KV, credit and the mask of its next token), there is no step, and `Scheduler.run`
waits for a change; where the KV of a planned step does not fit (`KVAdmission.fit`), a session gives its own up, and the
step is planned anew. That time is in no figure for waits: they are `StepTiming.waited`, which the metric
`slipstream_draft_wait_seconds_total` adds up, those for masks included, and which spans of rounds show as
`slipstream.bubble_s`.
"""
