"""Who has KV: nobody is lost, whoever comes first goes on, and the books balance."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.kvcache.block_pool import BlockPool
from slipstream.engine.kvcache.kv_cache import KVCache
from slipstream.engine.sampler.token_history import TokenHistory
from slipstream.engine.segment import Segment
from slipstream.speculation.candidate_tree import CandidateTree
from slipstream.speculation.sampling_params import SamplingParams
from slipstream.speculation.selection import Selection
from verifier_svc.execution.executor import ScheduledSequence
from verifier_svc.scheduling.kv_admission import RETURN_S, KVAdmission
from verifier_svc.session import Session, SessionRequest

BLOCKS, SIZE = 8, 4
LONGEST = BLOCKS * SIZE
CHUNK = 6
"""Tokens of a prompt that are read in a step."""


def session(
    arrival: int,
    tokens: list[int],
    max_length: int = LONGEST,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
) -> Session:
    request = SessionRequest(
        id=f"s{arrival}",
        number=arrival,
        epoch=1,
        sampling=SamplingParams(),
        prompt_length=len(tokens),
        max_length=max_length,
        stop_token_ids=frozenset(),
        max_draft_tokens=4,
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
    )
    return Session(
        request,
        tokens=list(tokens),
        credit=None,
        tree=CandidateTree(tokens),
        history=TokenHistory(tokens),
        arrival=arrival,
    )


def candidates(count: int) -> Selection:
    """A chain."""
    nothing = (0.0,) * count
    parents = tuple(range(-1, count - 1))
    return Selection(
        (1,) * count, parents, tuple(range(1, count + 1)), nothing, nothing, (None,) * count, ((),) * count
    )


class World:
    """A verifier without a model: sessions read their prompts and then commit a token a step, and candidates."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.kv = KVCache(BlockPool(blocks, SIZE), 1000)
        self.now = 0.0
        self.admission = KVAdmission(self.kv, lambda: self.now)
        self.sessions: list[Session] = []

    def add(self, new: Session) -> Session:
        self.sessions.append(new)
        self.admission.add_session(new)
        return new

    def turns(self, drafts: int = 0) -> list[ScheduledSequence]:
        turns = []
        for each in self.admission.admit():
            if each.runnable:
                pending = each.tokens[each.computed : each.computed + CHUNK]
                complete = len(pending) == each.pending
                turns.append(
                    ScheduledSequence(
                        each, len(each.tokens), each.computed, pending, complete, candidates(drafts if complete else 0)
                    )
                )
        return turns

    def step(self, drafts: int = 0, accepted: int = 0) -> list[ScheduledSequence]:
        """What the step was made of."""
        wanted = self.turns(drafts)
        turns = self.admission.fit(wanted)
        if wanted:  # in the order that `fit` took, before the step changes the sessions
            first = min((turn.session for turn in wanted), key=self.admission._order)
            assert first in {turn.session for turn in turns}, "whoever comes first goes on"
        for turn in turns:
            each, chosen = turn.session, turn.selection
            assert each.sequence is not None and each.sequence.length == turn.computed
            segment = Segment(each.sequence, turn.pending, list(chosen.token_ids), list(chosen.parents))
            segment.check()
            each.sequence.ahead = segment.tokens
            path = list(range(min(accepted, len(chosen), each.request.max_length - len(each.tokens) - 1)))
            self.kv.keep(segment, path if turn.complete else [])
            if not turn.complete:
                each.computed += len(turn.pending)
                continue
            each.commit([1] * len(path) + [each.arrival % 3], turn.base + len(path))
            if len(each.tokens) >= each.request.max_length:
                self.end(each)
        return turns

    def end(self, each: Session) -> None:
        each.closed = True
        self.admission.remove_session(each)
        self.sessions.remove(each)

    def balance(self) -> None:
        held = [each.sequence for each in self.sessions if each.sequence is not None]
        used = {block for sequence in held for block in sequence.blocks}
        assert self.kv.blocks_free == self.kv.blocks_total - len(used)
        assert self.admission.waiting == sum(each.sequence is None for each in self.sessions)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST - 4)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.tuples(prompts, st.integers(1, 12), st.integers(0, 2), st.integers(0, 30), st.sampled_from("ab")),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 4),
    st.data(),
)
def test_all_sessions_end_whatever_arrives_together(
    asked: list[tuple[list[int], int, int, int, str]], drafts: int, data: st.DataObject
) -> None:
    """Each with its prompt, its output, its priority, the step before which it comes, and its tenant."""
    world = World()
    coming = [
        (step, session(number, prompt, min(LONGEST, len(prompt) + more), priority, tenant=tenant))
        for number, (prompt, more, priority, step, tenant) in enumerate(sorted(asked, key=lambda each: each[3]))
    ]
    steps = 0
    while world.sessions or coming:
        while coming and coming[0][0] <= steps:
            world.add(coming.pop(0)[1])
        if world.sessions and steps < 200 and data.draw(st.booleans()):  # a client reads, or does not
            each = data.draw(st.sampled_from(world.sessions))
            each.credit = None if each.credit == 0 else 0
        if steps == 200:
            for each in world.sessions:
                each.credit = None
        inside = [each for each in world.admission.admit() if each.runnable]
        assert inside or not any(each.runnable for each in world.sessions), "somebody enters"
        world.step(drafts, data.draw(st.integers(0, drafts)) if drafts else 0)
        world.balance()
        steps += 1
        assert steps < 2000
    assert world.kv.blocks_free == BLOCKS and world.admission.waiting == 0


def test_a_session_enters_when_its_prompt_fits_not_when_its_longest_text_does() -> None:
    world = World()
    for number in range(4):
        world.add(session(number, [number] * 3))  # together they may need four times what there is
    assert len(world.turns()) == 4


def test_long_prompts_are_overtaken_by_four_times_their_size_and_no_more() -> None:
    """Short ones come all the time, and each ends before the next one comes; the long one fits beside none."""
    world = World()
    world.add(session(0, [0] * 9, 400))
    world.turns()
    long = world.add(session(1, [1] * 24))  # six blocks; five are free
    passed = 0
    while long.sequence is None and passed < 100:
        short = world.add(session(2 + passed, [2] * 8))  # two blocks
        world.turns()
        if short.sequence is not None:
            passed += 1
            world.end(short)
        elif world.sessions[0].arrival == 0:
            world.end(world.sessions[0])  # it makes room at last
    assert passed == 4 * 6 // 2
    assert long.sequence is not None


def test_a_tenant_within_its_share_takes_the_room_that_another_has_beyond_its_own() -> None:
    world = World(blocks=18)
    many = [world.add(session(number, [number] * 9, tenant="many")) for number in range(4)]  # three blocks each
    assert len(world.turns()) == 4
    few = world.add(session(9, [9] * 9, tenant="few"))
    assert {turn.session for turn in world.turns()} >= {few, many[0]} and world.admission.preemptions == 1
    again = world.add(session(10, [8] * 25, tenant="few"))  # ten in all, with those that stay free to grow
    world.turns()
    assert again.sequence is None and world.admission.preemptions == 1, "beyond its own share it waits"


def test_a_session_above_its_tenants_share_is_admitted_at_last_and_stays() -> None:
    """Another tenant's short sessions come without an end, two at a time; the large one fits beside none."""
    world = World()
    large = session(0, [0] * 27, 30, tenant="large")  # seven of eight blocks
    shorts = [world.add(session(number, [number] * 6, 20, tenant="short")) for number in (1, 2)]
    world.turns()
    world.add(large)
    passed = 0
    while large.sequence is None and passed < 100:
        world.end(shorts.pop(0))
        shorts.append(world.add(session(3 + passed, [passed] * 6, 20, tenant="short")))
        world.turns()
        passed += 1
    assert 4 * 7 // 2 <= passed < 20
    world.step()
    assert large.sequence is not None, "nothing takes its room again"


def test_no_session_enters_in_an_idle_ones_place_only_to_make_room_for_another() -> None:
    """An idle session's KV counted as its tenant's, until it was preempted: then the other tenant's share was less."""
    world = World()
    idle = world.add(session(0, [0] * 16, tenant="a"))
    world.turns()
    idle.credit = 0
    large = world.add(session(1, [1] * 26, tenant="b"))
    small = world.add(session(2, [2] * 4, tenant="a"))
    assert [turn.session for turn in world.turns()] == [small] == [turn.session for turn in world.turns()]
    assert large.sequence is None and idle.sequence is not None and world.admission.preemptions == 0


def test_the_last_session_to_arrive_is_preempted_and_continues_later_where_it_was() -> None:
    world = World(blocks=5)
    first, last = world.add(session(0, [0] * 7, 16)), world.add(session(1, [1] * 6, 15))
    world.step()
    world.step()
    while first in world.sessions:
        world.step()
    assert world.admission.preemptions == 1 and len(last.tokens) < 15
    while last in world.sessions:
        world.step()
    assert last.tokens[:6] == [1] * 6 and len(last.tokens) == 15


def test_candidates_are_given_up_before_any_session_loses_its_kv() -> None:
    world = World(blocks=5)
    world.add(session(0, [0] * 5, 16))
    world.add(session(1, [1] * 5, 16))
    world.step()
    assert [len(turn.selection) for turn in world.step(drafts=4)] == [4, 0]
    assert world.admission.preemptions == 0


def test_a_higher_priority_takes_the_room_of_a_lower_one() -> None:
    world = World()
    low = [world.add(session(number, [number] * 9, priority=5)) for number in range(2)]
    assert len(world.turns()) == 2
    high = world.add(session(2, [7] * 20, priority=-1))
    sessions = [turn.session for turn in world.turns()]
    assert high in sessions and low[1] not in sessions and world.admission.preemptions >= 1


def test_sessions_of_equal_priority_do_not_preempt_each_other_to_enter() -> None:
    world = World()
    world.add(session(0, [0] * 20))
    world.turns()
    world.add(session(1, [1] * 20))
    assert [turn.session.arrival for turn in world.turns()] == [0] and world.admission.preemptions == 0


def test_a_session_whose_client_does_not_read_gives_its_room_up_first_and_comes_back() -> None:
    world = World()
    slow = world.add(session(0, [0] * 20))
    for _ in range(4):
        world.step()
    slow.credit = 0
    world.add(session(1, [1] * 20))
    assert [turn.session.arrival for turn in world.turns()] == [1]
    world.balance()
    world.end(world.sessions[1])
    slow.credit = 5
    assert [turn.session for turn in world.turns()] == [slow]
    assert slow.computed >= 4  # the beginning of what it had is still there


def test_a_slow_client_s_kv_is_not_computed_again_for_each_token_that_it_takes() -> None:
    """Two clients take one token at a time in turn, and only one of their sessions has room."""
    world = World(blocks=7)
    both = [world.add(session(number, [number] * 17)) for number in range(2)]
    computed = 0

    def go_on() -> None:
        nonlocal computed
        while turns := world.step():
            computed += sum(len(turn.pending) for turn in turns)

    for each in both:
        each.credit, each.credit_window = 1, 8
    go_on()
    for _ in range(8):
        for each in both:
            each.add_credit(1)
            go_on()
    texts = [len(each.tokens) - 17 for each in both]
    assert min(texts) >= 5 and computed <= 3 * sum(map(len, (each.tokens for each in both))), computed
    world.now += RETURN_S
    go_on()
    world.now += RETURN_S
    go_on()
    assert [len(each.tokens) - 17 for each in both] == [9, 9], "the rest came too, if later"
    world.balance()


def test_a_waiting_session_enters_as_soon_as_another_one_cannot_run() -> None:
    world = World()
    slow = world.add(session(0, [0] * 20))
    world.add(session(1, [1] * 20))
    assert [turn.session for turn in world.turns()] == [slow]
    slow.credit = 0
    assert [turn.session.arrival for turn in world.turns()] == [1]


def test_no_session_is_preempted_in_vain() -> None:
    world = World(blocks=20)
    world.add(session(0, [0] * 37, 60))
    for number in range(1, 4):
        world.add(session(number, [number] * 5, 60, priority=5))
    assert len(world.turns()) == 4
    world.add(session(4, [9] * 60, 80))
    assert len(world.turns()) == 4 and world.admission.preemptions == 0


def test_sessions_that_leave_while_they_wait_are_forgotten() -> None:
    world = World()
    world.add(session(0, [0] * 20))
    world.turns()
    world.add(session(1, [1] * 20))
    for number in range(2, 1000):
        world.end(world.add(session(number, [2] * 20)))
    world.turns()
    assert world.admission.waiting == 1 and len(world.admission._ageing._may_pass) == 1


def test_prompts_that_begin_alike_are_read_once() -> None:
    world = World(blocks=16)
    prompt = [1, 2, 3] * 6
    world.add(session(0, prompt))
    for _ in range(4):
        world.step()
    other = world.add(session(1, [*prompt, 9]))
    world.turns()
    assert other.computed == 16 and other.sequence is not None
    salted = world.add(session(2, prompt, salt="else"))
    world.turns()
    assert salted.computed == 0


def test_a_session_waits_for_memory_once_it_found_no_room_and_not_before_it_was_tried() -> None:
    """Gateways send new sessions elsewhere while there are any."""
    world = World()
    first = world.add(session(0, [1] * (LONGEST - SIZE)))
    assert (world.admission.waiting, world.admission.refused) == (1, 0)  # as while a step runs
    world.step()
    second = world.add(session(1, [2] * SIZE))
    assert world.admission.refused == 0
    world.step()
    assert first.sequence is not None and second.sequence is None and world.admission.refused == 1
    world.add(session(2, [2] * SIZE))
    assert world.admission.refused == 1
    world.step()
    assert world.admission.refused == 2
    world.end(first)
    assert world.admission.refused == 2
    world.step()
    assert world.admission.refused == 0 == world.admission.waiting
