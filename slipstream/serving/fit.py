"""Whether the models of a fleet that has started fit each other."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from slipstream.errors import FailedPrecondition
from slipstream.rpc import DRAFTER, VERIFIER
from slipstream.rpc.channel import dialer, parsed
from slipstream.rpc.tls import certificates_from_env
from slipstream.tokenizer.vocabulary import share_vocabulary, template_warning
from slipstream.v1 import worker_pb2, worker_pb2_grpc


async def check_fit(verifier: str, drafters: Sequence[str]) -> None:
    """Raises FailedPrecondition for a draft model with another vocabulary: it would never be used. Prints a warning for
    one with another chat template, and for each model that does without its fast forward pass."""
    certificates, models = certificates_from_env(), []
    for role, address in ((VERIFIER, verifier), *((DRAFTER, drafter) for drafter in drafters)):
        async with dialer(role, certificates)(address) as line:
            stub = worker_pb2_grpc.WorkerServiceStub(line)
            models.append(parsed(await stub.GetModel(worker_pb2.GetModelRequest())).model)
    for model in models:
        if model.forward_notice:
            typer.echo(f"slipstream serve: WARNING: {model.name}: {model.forward_notice}", err=True)
    target = models[0]
    for model in models[1:]:
        if not share_vocabulary(model, target):
            raise FailedPrecondition(
                f"draft model {model.name} has vocabulary {model.vocabulary_fingerprint}, target {target.name} has "
                f"{target.vocabulary_fingerprint}; choose a pair with one tokenizer, or let the drafter translate "
                "(`slipstream serve --translate`).",
                reason="VOCABULARY_MISMATCH",
            )
        if warning := template_warning(model, target):
            typer.echo(f"slipstream serve: {warning}", err=True)
