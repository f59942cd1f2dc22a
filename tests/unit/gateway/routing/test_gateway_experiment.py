"""Arms: how they are written, who is in which, and what is kept of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.routing.experiment import MAX_ARMS, MAX_SHADOWS, Arm, Experiment, parse
from gateway.routing.rules import Rule
from gateway.telemetry.experiment_samples import DEPTHS, KEPT, ExperimentSamples
from measurement.experiments.comparison import merge
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.rpc.channel import MAX_MESSAGE_BYTES
from slipstream.v1 import gateway_pb2, verifier_pb2

KNOWN = ("model", "ngram", "suffix", "new")
SPLIT = "old: 80 drafters=model; new: 15 drafters=suffix max_draft_tokens=4; plain: 5 off; seen: 1 shadow=new+ngram"


def experiment(text: str = SPLIT, name: str = "trial") -> Experiment:
    found = parse(name, text, KNOWN)
    assert found is not None
    return found


def test_arms_are_read() -> None:
    assert experiment().arms == (
        Arm("old", 80, Rule(drafters=("model",))),
        Arm("new", 15, Rule(drafters=("suffix",), max_draft_tokens=4)),
        Arm("plain", 5, Rule(off=True)),
        Arm("seen", 1, Rule(), ("new", "ngram")),
    )
    assert experiment().reserved == {"new", "ngram"} and not experiment("a: 1 drafters=new; b: 1 shadow=new").reserved
    assert parse("trial", " ; ", KNOWN) is None


ARMS = st.builds(
    Arm,
    st.from_regex(r"\A[A-Za-z0-9_-]{1,32}\Z"),
    st.integers(1, 1_000_000),
    st.one_of(
        st.just(Rule()),
        st.builds(
            Rule,
            drafters=st.just(("model", "suffix")),
            max_draft_tokens=st.one_of(st.none(), st.integers(1, 64)),
        ),
    ),
    st.sampled_from([(), ("new",), ("ngram", "new")]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(ARMS, min_size=1, max_size=MAX_ARMS, unique_by=lambda arm: arm.name))
def test_an_experiment_is_parsed_back_from_its_own_text(arms: list[Arm]) -> None:
    written = Experiment("trial", tuple(arms))
    assert parse("trial", str(written), KNOWN) == written


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("old 80 drafters=model", "write NAME: WEIGHT"),
        ("old:", "its weight is ''"),
        ("old: 0 off", "its weight is '0'"),
        ("old: -3 off", "its weight is '-3'"),
        ("old: 1.5 off", "its weight is '1.5'"),
        ("old: drafters=model", "its weight is 'drafters=model'"),
        ("old: 1 off; old: 2 drafters=model", "another arm is named 'old'"),
        ("old: 1 drafters=nobody", "has no 'nobody'"),
        ("old: 1 shadow=nobody", "has no 'nobody'"),
        ("old: 1 drafters=model shadow=model", "model serves in this arm"),
        ("old: 1 off shadow=model", "no drafter proposes without speculation"),
        ("old: 1 shadow=model shadow=new", "give shadow=A+B once"),
        ("old: 1 shadow=new+new", "give shadow=A+B once"),
        ("old: 1 off drafters=model", "'off' cannot be read"),
        ("old: 1 fast", "'fast' cannot be read"),
        ("o ld: 1 off", "write NAME: WEIGHT"),
        ("; ".join(f"a{number}: 1" for number in range(MAX_ARMS + 1)), "give at most"),
    ],
)
def test_an_invalid_experiment_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match="GATEWAY_EXPERIMENT") as refusal:
        parse("trial", text, KNOWN)
    assert sentence in refusal.value.message


def test_an_experiment_name_with_a_space_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="GATEWAY_EXPERIMENT_NAME"):
        parse("two words", "a: 1", KNOWN)


def test_sessions_are_dealt_by_weight_and_another_name_deals_them_anew() -> None:
    chance, trial, other = random.Random(5), experiment(), experiment(name="other")
    names = [f"{chance.getrandbits(128):032x}" for _ in range(5000)]
    dealt = [trial.arm_of(name).name for name in names]
    shares = {arm.name: arm.weight / 101 for arm in trial.arms}
    for name, share in shares.items():
        assert abs(dealt.count(name) - 5000 * share) < 5 * (5000 * share * (1 - share)) ** 0.5
    same = sum(other.arm_of(name).name == arm for name, arm in zip(names, dealt, strict=True)) / 5000
    assert same == pytest.approx(sum(share**2 for share in shares.values()), abs=0.04)
    low = sum(trial.priority(name) < 2**63 for name, arm in zip(names, dealt, strict=True) if arm == "old")
    assert low == pytest.approx(dealt.count("old") / 2, rel=0.08)  # a priority says nothing of the arm


def test_an_arm_is_the_same_on_every_gateway() -> None:
    """Written down: a gateway of another release must deal as this one does."""
    dealt = [experiment().arm_of(f"session-{number}").name for number in range(12)]
    assert dealt == ["new", "old", "old", "new", *["old"] * 7, "new"]
    assert experiment().priority("session-0") == 3299711891588812582


def finished(tokens: int, reason: Any = verifier_pb2.FINISH_REASON_STOP) -> gateway_pb2.Finished:
    statistics = gateway_pb2.Statistics(ttft_s=0.1, e2e_s=1.1)
    return gateway_pb2.Finished(reason=reason, output_tokens=tokens, statistics=statistics)


def test_rounds_tokens_and_shadow_scores_of_a_session_are_counted() -> None:
    trial = ExperimentSamples(experiment())
    sample_of = trial.sample("seen", "s")
    score = verifier_pb2.ShadowScore
    sample_of.round_shown(verifier_pb2.Round(drafted=4, accepted=2, cost_us=1000))
    sample_of.round_shown(verifier_pb2.Round(cost_us=500, shadows=[score(drafter="new", drafted=5, accepted=3)]))
    sample_of.round_shown(
        verifier_pb2.Round(drafted=1, accepted=1, shadows=[score(drafter="new", drafted=2, accepted=1)])
    )
    sample_of.session_finished(finished(7), 1.5)
    told = {arm.name: arm for arm in trial.results().arms}["seen"]
    assert (told.begun, told.finished) == (1, 1)
    (sample,) = told.samples
    assert sample.priority == trial.experiment.priority("s")
    served, new = sample.served, sample.shadows["new"]
    assert (served.rounds, served.rounds_with_drafts, served.drafted, served.accepted) == (3, 2, 5, 3)
    assert list(served.reached) == [2, 1]
    assert (new.rounds, new.rounds_with_drafts, new.drafted, new.accepted) == (2, 2, 7, 4)
    assert list(new.reached) == [2, 1, 1]
    assert (sample.tokens, sample.verifier_s) == (7, pytest.approx(0.0015))
    assert sample.drafter_s == pytest.approx(1.65)


@pytest.mark.parametrize("reason", [verifier_pb2.FINISH_REASON_CANCELLED, verifier_pb2.FINISH_REASON_ERROR])
def test_a_session_that_did_not_finish_by_itself_is_counted_and_not_measured(reason: Any) -> None:
    trial = ExperimentSamples(experiment())
    trial.sample("old", "s").session_finished(finished(7, reason), 1.0)
    old = trial.results().arms[0]
    assert (old.begun, old.finished, len(old.samples)) == (1, 0, 0)


def measured(names: list[str]) -> gateway_pb2.GetExperimentResponse:
    """A gateway that all these sessions ran on."""
    trial = ExperimentSamples(experiment("all: 1"))
    for name in names:
        trial.sample("all", name).session_finished(finished(len(name)), 1.0)
    return trial.results()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.telemetry.experiment_samples.KEPT", 5)


@pytest.mark.usefixtures("few")
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_gateways_samples_merge_into_what_one_gateway_would_have_kept(owners: list[int]) -> None:
    names = [f"s{number}" for number in range(len(owners))]
    parts = [measured([n for n, owner in zip(names, owners, strict=True) if owner == each]) for each in range(3)]
    whole = sorted(ExperimentSamples(experiment("all: 1")).experiment.priority(name) for name in names)
    for order in (parts, parts[::-1], [merge(parts[:2]), parts[2]]):
        (arm,) = merge(order).arms
        kept = [sample.priority for sample in arm.samples]
        assert (arm.begun, arm.finished) == (len(names), len(names))
        assert kept == whole[: len(kept)]  # the lowest of all there were: none is missing below the highest
        assert len(kept) >= min(5, len(names))
        if all(len(part.arms[0].samples) == part.arms[0].finished for part in parts):
            assert kept == whole


def test_samples_of_different_experiments_are_not_merged() -> None:
    other = ExperimentSamples(experiment("all: 2")).results()
    with pytest.raises(FailedPrecondition) as refusal:
        merge([measured(["a"]), other])
    assert refusal.value.reason == "EXPERIMENTS_DIFFER"


def test_the_largest_sample_of_an_experiment_fits_into_one_message() -> None:
    draft = gateway_pb2.DraftSample(
        rounds=4095, rounds_with_drafts=4095, drafted=32767, accepted=32767, reached=[4095] * DEPTHS
    )
    shadows = {"x" * 16 + str(number): draft for number in range(MAX_SHADOWS)}
    sample = gateway_pb2.SessionSample(
        priority=2**64 - 1,
        tokens=32767,
        served=draft,
        shadows=shadows,
        ttft_s=1.0,
        e2e_s=1.0,
        verifier_s=1,
        drafter_s=1,
    )
    arms = [gateway_pb2.ExperimentArm(name="x" * 32, begun=2**40, finished=2**40, samples=[sample] * KEPT)] * MAX_ARMS
    assert gateway_pb2.GetExperimentResponse(arms=arms).ByteSize() < MAX_MESSAGE_BYTES
