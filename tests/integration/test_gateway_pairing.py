"""Which drafters a request gets, and what its client is told of them; scripted verifiers, over real gRPC."""

from __future__ import annotations

import pytest

from slipstream.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
)
from slipstream.v1 import gateway_pb2, types_pb2, verifier_pb2
from tests.support.scripted_gateway import Front, Setting


async def test_drafters_are_paired_by_name_vocabulary_and_method(setting: Setting) -> None:
    good, twin, ngram = await setting.drafter(), await setting.drafter(), await setting.drafter("ngram")
    odd = await setting.drafter(vocabulary_fingerprint="f00d", name="odd-model")
    front = await setting.front(
        setting.verifier(), drafters=(f"good={good}", f"twin={twin}", f"ngram={ngram}", f"odd={odd}")
    )
    while any(not drafter.present for drafter in front.gateway.router.drafters):
        await front.gateway.router.changes.wait()
    await front.generate(max_tokens=3)
    await front.generate(max_tokens=3, speculation=gateway_pb2.SpeculationOptions(drafters=["twin"]))
    await front.generate(max_tokens=3, speculation=gateway_pb2.SpeculationOptions(disabled=True))
    named = [[drafter.name for drafter in opened.drafters] for opened in front.verifiers[0].opens()]
    assert named == [["good", "ngram"], ["twin"], []]
    assert front.verifiers[0].opens()[2].policy.max_draft_tokens == 0
    with pytest.raises(FailedPrecondition, match="f00d") as caught:
        await front.generate(speculation=gateway_pb2.SpeculationOptions(drafters=["odd"]))
    assert setting.model.vocabulary_fingerprint in caught.value.message
    listed = await front.stub.ListModels(gateway_pb2.ListModelsRequest())
    assert [bool(drafter.mismatch) for drafter in listed.models[0].drafters] == [False, False, False, True]
    assert (listed.models[0].model.name, listed.models[0].verifiers) == ("toy", 1)


async def known(front: Front) -> None:
    """All drafters have introduced themselves."""
    while any(not drafter.present for drafter in front.gateway.router.drafters):
        await front.gateway.router.changes.wait()


async def test_a_prediction_brings_its_drafter_and_none_leaves_it_out(setting: Setting) -> None:
    model, prediction = await setting.drafter(), await setting.drafter("prediction")
    front = await setting.front(setting.verifier(), drafters=(f"m={model}", f"p={prediction}"))
    await known(front)
    expected = gateway_pb2.Prediction(text="Käse")
    named = gateway_pb2.SpeculationOptions(drafters=["p"])
    await front.generate(max_tokens=3)
    answer = await front.generate(max_tokens=3, prediction=expected, workload="edit", cache_salt="acme")
    await front.generate(max_tokens=3, prediction=expected, speculation=named)
    opens = front.verifiers[0].opens()
    assert [[drafter.name for drafter in opened.drafters] for opened in opens] == [["m"], ["m", "p"], ["p"]]
    ids = front.tokenizer.encode("Käse").ids
    assert [list(opened.prediction_token_ids) for opened in opens] == [[], ids, ids]
    assert (opens[1].workload, opens[1].cache_salt) == ("edit", "acme")
    record = await front.store.read(answer.started.session_id)
    asked = gateway_pb2.GenerateRequest.FromString(record.params)
    assert (asked.workload, asked.cache_salt, list(asked.prediction.token_ids.token_ids)) == ("edit", "acme", ids)
    with pytest.raises(InvalidArgument, match="prediction") as caught:
        await front.generate(speculation=named)
    assert caught.value.reason == "NO_PREDICTION"


async def test_rules_choose_drafters_for_requests_that_name_none(setting: Setting) -> None:
    model, ngram, prediction = [await setting.drafter(method) for method in ("model", "ngram", "prediction")]
    front = await setting.front(
        setting.verifier(),
        drafters=(f"m={model}", f"n={ngram}", f"p={prediction}"),
        rules="max_tokens<3: off; workload=chat: drafters=n+p; salt=acme: drafters=p max_draft_tokens=2",
    )
    await known(front)
    expected = gateway_pb2.Prediction(text="x")
    for request in (
        {"max_tokens": 2},
        {"workload": "chat"},
        {"workload": "chat", "prediction": expected},
        {"workload": "chat", "speculation": gateway_pb2.SpeculationOptions(drafters=["m"])},
        {"max_tokens": 2, "speculation": gateway_pb2.SpeculationOptions(drafters=["m"])},
        {"cache_salt": "acme"},
        {"workload": "other", "cache_salt": "else"},
    ):
        await front.generate(**{"max_tokens": 4} | request)
    opens = front.verifiers[0].opens()
    names = [sorted(drafter.name for drafter in opened.drafters) for opened in opens]
    assert names == [[], ["n"], ["n", "p"], ["m"], ["m"], [], ["m", "n"]]
    assert [opened.policy.max_draft_tokens for opened in opens] == [0, 8, 8, 8, 8, 2, 8]


async def test_statistics_name_the_drafters_of_candidates_and_the_causes_of_misses(setting: Setting) -> None:
    def shared(done: verifier_pb2.Round) -> list[verifier_pb2.Round]:
        shares = [
            verifier_pb2.DrafterShare(drafter=name, drafted=done.drafted, accepted=done.accepted) for name in ("m", "p")
        ]
        done.drafters.extend(shares)
        done.miss = verifier_pb2.MISS_CAUSE_OPENING if done.base_length == prompt else done.miss
        done.bubble_us = 100
        return [done]

    prompt = len(setting.tokenizer.encode("Tell me.").ids)
    model, prediction = await setting.drafter(), await setting.drafter("prediction")
    verifier = setting.verifier(per_round=4, mangle=shared)
    front = await setting.front(verifier, drafters=(f"m={model}", f"p={prediction}"))
    await known(front)
    expected = gateway_pb2.Prediction(text="x")
    told = (await front.generate(max_tokens=40, prediction=expected)).finished.statistics
    assert (told.hits, dict(told.misses), told.bubble_s) == (9, {"opening": 1}, pytest.approx(1e-3))
    assert [(one.name, one.drafted, one.accepted) for one in told.drafters] == [("m", 40, 30), ("p", 40, 30)]
    assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (30, 10)
    plain = gateway_pb2.SpeculationOptions(disabled=True)
    told = (await front.generate(max_tokens=40, speculation=plain)).finished.statistics
    assert (told.hits, dict(told.misses)) == (0, {})


async def test_the_ratio_rule_needs_a_trusted_drafter(setting: Setting) -> None:
    rejection = gateway_pb2.SamplingOptions(acceptance=types_pb2.ACCEPTANCE_RULE_REJECTION)
    address = await setting.drafter()
    untrusting = await setting.front(setting.verifier(), drafters=(f"model={address}",))
    for names in ([], ["model"]):
        with pytest.raises(PermissionDenied, match="GATEWAY_TRUSTED_DRAFTERS"):
            await untrusting.generate(sampling=rejection, speculation=gateway_pb2.SpeculationOptions(drafters=names))
    trusting = await setting.front(setting.verifier(), drafters=(f"m={address}",), trusted_drafters=("m",))
    named = gateway_pb2.SpeculationOptions(drafters=["m"])
    await trusting.generate(sampling=rejection, speculation=named, max_tokens=3)
    (opened,) = trusting.verifiers[0].opens()
    assert opened.drafters[0].trusted
    assert opened.sampling.acceptance == types_pb2.ACCEPTANCE_RULE_REJECTION
