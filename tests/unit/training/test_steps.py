"""What makes a step cheap computes what it stands for: losses in chunks, Muon, outputs over few tokens, the start."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.eagle_heads import save_easy_target
from training import loss
from training.corpus import TrainingBatch
from training.eagle import likeliest
from training.loss import distilled, divergence
from training.muon import Muon, orthogonal
from training.request import TrainRequest
from training.run import open_drafter
from training.split_model import ModuleLearner
from training.target import Target
from training.trained_drafter import UNKNOWN, reached
from training.trainer import CheckpointPolicy, Trainer


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_losses_in_chunks_have_the_value_and_the_gradients_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK", 3)
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 5, generator=noise, requires_grad=True)
    head = torch.randn(11, 5, generator=noise, requires_grad=True)
    target, weights = 2 * torch.randn(7, 11, generator=noise), torch.rand(2, 7, generator=noise)
    asked: list[slice] = []

    def teacher(part: slice) -> torch.Tensor:
        asked.append(part)
        return target[part]

    found = distilled(hidden, head, weights, teacher, kind)
    wanted = (weights * torch.stack([divergence(rows @ head.T, target, kind) for rows in hidden])).sum()
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(2 * found, (hidden, head))
    for got, right in zip(gradients, torch.autograd.grad(2 * wanted, (hidden, head)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    assert len(asked) == 3  # once for all depths


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_muon_is_torch_s_rule(shape: tuple[int, int]) -> None:
    """Which computes in bfloat16."""
    noise = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(shape, generator=noise), [torch.randn(shape, generator=noise) for _ in range(3)]
    found, wanted = start.clone(), start.clone()
    ours = Muon([found], lr=0.1, weight_decay=0.05, momentum=0.9)
    theirs = torch.optim.Muon([wanted], lr=0.1, weight_decay=0.05, momentum=0.9)
    for gradient in gradients:
        found.grad, wanted.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert (found - start).norm() > 0.5
    assert (found - wanted).norm() < 0.03 * (wanted - start).norm()
    assert ours.state_dict()["state"][0].keys() == {"momentum_buffer"}
    values = torch.linalg.svdvals(orthogonal(gradients[0]))
    assert values.min() > 0.3 and values.max() < 1.5


def test_the_likeliest_tokens_are_the_most_frequent_then_those_with_small_numbers() -> None:
    frequency = torch.tensor([0, 3, 0, 0, 9, 3, 0])
    assert likeliest(frequency, 2).tolist() == [1, 4]
    assert likeliest(frequency, 5).tolist() == [0, 1, 2, 4, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(str(save_easy_target(tmp_path_factory.mktemp("target") / "llama")), dtype="float32")


def eagle(target: Target, frequency: torch.Tensor, **settings: Any) -> Any:
    request = TrainRequest("eagle", target.name, "out", depth=3, window=24, **settings)
    return open_drafter(request, target, frequency)


def batch_of(target: Target, tokens: torch.Tensor) -> tuple[TrainingBatch, Any]:
    learned = torch.ones_like(tokens, dtype=torch.bool)
    learned[:, :3] = False
    return TrainingBatch(tokens, learned), target.read(tokens.tolist(), (0, 1, 2))


def test_an_output_over_few_tokens_learns_the_target_s_distribution_among_them(target: Target) -> None:
    """At the places whose token it has, as a plain computation says; with all tokens that is the whole loss."""
    tokens = torch.randint(199, (2, 14), generator=torch.Generator().manual_seed(2))
    for known in (199, 120):
        drafter = eagle(target, 199 - torch.arange(199), draft_vocabulary=known)
        batch, states = batch_of(target, tokens)
        ids = drafter.module.target_ids
        assert ids.tolist() == list(range(known))
        wanted = torch.tensor(0.0)
        for depth, own in enumerate(drafter._passes(batch, states)):
            parts = [
                divergence(
                    drafter.module.logits(own[row, root]), target.logits(states.last[row, root + 1 + depth])[ids], "kl"
                )
                for row in range(2)
                for root in range(12 - depth)
                if root + 2 + depth >= 3 and tokens[row, root + 2 + depth] < known
            ]
            wanted = wanted + 0.8**depth * torch.stack(parts).mean()
        torch.testing.assert_close(drafter.loss(batch, states), wanted)


def test_a_token_that_the_output_has_not_is_never_a_candidate(target: Target) -> None:
    drafter = eagle(target, torch.arange(199), draft_vocabulary=60, learn_output=False, kv_heads=4)
    assert drafter.module.target_ids.tolist() == list(range(139, 199))
    assert not drafter.module.lm_head.weight.requires_grad
    assert torch.equal(drafter.module.lm_head.weight, target.output[139:])
    tokens = torch.randint(100, 199, (2, 14), generator=torch.Generator().manual_seed(3))
    batch, states = batch_of(target, tokens)
    ranks, logits = (
        drafter.ranks(batch, states),
        [drafter.module.target_logits(own) for own in drafter._passes(batch, states)],
    )
    for depth in range(3):
        for row in range(2):
            for root in range(14):
                place = root + 2 + depth
                if place >= 14 or place < 3:
                    assert ranks[depth, row, root] == UNKNOWN
                    continue
                order = logits[depth][row, root].argsort(descending=True).tolist()
                known = tokens[row, place] >= 139
                rank = order.index(int(tokens[row, place])) if known else 16
                assert int(ranks[depth, row, root]) == min(rank, int(ranks.max()))
    assert not torch.equal(reached(ranks[0], batch, 0), torch.full_like(ranks[0], UNKNOWN))


def test_a_head_starts_far_better_than_a_random_one(target: Target) -> None:
    """The target's own next token among the first choices, on texts that the start has not seen."""
    tokens = torch.randint(199, (24, 24), generator=torch.Generator().manual_seed(4))
    batch, states = batch_of(target, tokens[:20])
    unseen, held_out = batch_of(target, tokens[20:])
    wanted = target.logits(held_out.last).argmax(-1)
    found = []
    for started in (False, True):
        drafter = eagle(target, torch.ones(199, dtype=torch.int64), kv_heads=4)
        if started:
            drafter.calibrate(batch, states)
        [first, *_] = drafter._passes(unseen, held_out)
        found.append(float((drafter.module.logits(first).argmax(-1)[:, :-1] == wanted[:, 1:]).float().mean()))
    assert found[1] > 0.15 and found[1] > 5 * found[0]


def test_ctrl_c_ends_the_step_and_keeps_it_and_a_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    policy = CheckpointPolicy(tmp_path / "last.pt", "key", 60.0, resume=True)

    def steps(count: int, interrupted: int = -1) -> list[float]:
        plan = TrainRequest("eagle", "target", "out", steps=count)
        batches = lambda used, step: TrainingBatch(torch.ones(1, 4, dtype=torch.int64) * step)  # noqa: E731
        trainer = Trainer(plan, ModuleLearner(module), batches)

        def loss_of(_: Any, batch: TrainingBatch) -> torch.Tensor:
            if batch.tokens[0, 0] == interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            found: torch.Tensor = module(torch.ones(3)).square().sum()
            return found

        return trainer.run(loss_of, policy).losses

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        steps(6, interrupted=2)
    assert signal.getsignal(signal.SIGINT) is before
    losses = steps(6)  # goes on behind the step that was interrupted
    assert len(losses) == 6
    assert steps(6) == losses  # there is nothing left to do
    more = steps(9)
    assert more[:6] == losses and len(more) == 9
