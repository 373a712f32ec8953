"""One optimiser step: micro-batches, duplicates, bad numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from tba.config import ArithmeticTaskConfig, BuildConfig, Config, ModelConfig
from tba.config.objectives import ObjectiveConfig
from tba.objectives import OBJECTIVES
from tba.objectives.preference import best_and_worst
from tba.policy.loading import Policy
from tba.records import Batch
from tba.update import PolicyUpdate, micro_batches


def make_config(**trainer: object) -> Config:
    return Config.model_validate(
        {
            "task": ArithmeticTaskConfig(max_prompt_length=8),
            "model": ModelConfig(build=BuildConfig()),
            "search": {"max_completion_length": 6},
            "trainer": {"samples_per_query": 3, "learning_rate": 1e-3, **trainer},
        }
    )


def make_batch(seed: int = 0, queries: int = 5, rows_each: int = 4, samples: int = 6) -> Batch:
    """Prompts and responses of unequal length; some rows are drawn twice, as with replacement."""
    rng = np.random.default_rng(seed)
    rows = queries * rows_each
    lengths = rng.integers(1, 6, size=rows)

    def floats() -> tuple[np.ndarray, ...]:
        return tuple((-rng.random(n)).astype(np.float32) for n in lengths)

    index = np.stack(
        [
            q * rows_each
            + np.r_[np.arange(rows_each), rng.integers(0, rows_each, samples - rows_each)]
            for q in range(queries)
        ]
    )
    return Batch(
        prompts=tuple(
            rng.integers(2, 14, size=n).astype(np.int32) for n in rng.integers(2, 8, queries)
        ),
        tokens=tuple(rng.integers(2, 14, size=n).astype(np.int32) for n in lengths),
        log_mu=floats(),
        log_ref=floats(),
        reward=rng.random(rows).astype(np.float32),
        policy_version=np.zeros(rows, dtype=np.int64),
        reference_version=np.zeros(rows, dtype=np.int64),
        finished=np.ones(rows, dtype=bool),
        slots=np.arange(rows),
        query_of_row=np.repeat(np.arange(queries), rows_each),
        index=index,
        on_policy=np.ones(queries, dtype=bool),
    )


def gradient_of(
    policy: Policy, batch: Batch, budget: int, kind: str = "tb"
) -> tuple[torch.Tensor, float]:
    config = make_config(micro_batch_tokens=budget, max_grad_norm=1e9)
    objective = TypeAdapter(ObjectiveConfig).validate_python({"kind": kind})
    config = config.model_copy(update={"objective": objective})
    update = PolicyUpdate(policy.model, config)
    update.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    result = update.step(batch, 0)
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])  # type: ignore[union-attr]
    return gradient, result.metrics["loss"]


def test_micro_batch_gradient_equals_the_one_batch_gradient(policy: Policy) -> None:
    batch = make_batch()
    whole, loss = gradient_of(policy, batch, budget=10_000)
    parts, loss_of_parts = gradient_of(policy, batch, budget=30)
    assert len(list(micro_batches(batch, 30))) > 2
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6 * whole.abs().max().item())
    assert (parts - whole).norm() / whole.norm() < 1e-5


def test_micro_batches_hold_whole_queries_within_the_budget_and_every_query_once() -> None:
    batch = make_batch(queries=7)
    micros = [batch.select(queries) for queries in micro_batches(batch, 60)]
    assert 1 < len(micros) < 7
    for micro in micros:
        inputs = sum(len(tokens) - 1 for tokens in micro.tokens)
        assert sum(map(len, micro.prompts)) + inputs <= 60 or len(micro.prompts) == 1
    prompts = sorted(p.tobytes() for micro in micros for p in micro.prompts)
    assert prompts == sorted(p.tobytes() for p in batch.prompts)


def test_a_sample_drawn_twice_counts_twice(policy: Policy) -> None:
    """The batch with repeats equals one in which each repeat is a row of its own."""
    batch = make_batch(queries=2, rows_each=3, samples=5)
    flat = batch.index.ravel()
    spelled_out = Batch(
        prompts=batch.prompts,
        tokens=tuple(batch.tokens[r] for r in flat),
        log_mu=tuple(batch.log_mu[r] for r in flat),
        log_ref=tuple(batch.log_ref[r] for r in flat),
        reward=batch.reward[flat],
        policy_version=batch.policy_version[flat],
        reference_version=batch.reference_version[flat],
        finished=batch.finished[flat],
        slots=batch.slots[flat],
        query_of_row=np.repeat(np.arange(2), 5),
        index=np.arange(10).reshape(2, 5),
        on_policy=batch.on_policy,
    )
    once, _ = gradient_of(policy, batch, budget=10_000)
    twice, _ = gradient_of(policy, spelled_out, budget=10_000)
    assert (once - twice).norm() / twice.norm() < 1e-5


def test_samples_that_the_loss_is_not_of_change_nothing(policy: Policy, monkeypatch) -> None:
    """Online DPO: the model sees the best and the worst sample of each query alone."""
    batch = make_batch(samples=4)
    chosen, loss = gradient_of(policy, batch, budget=30, kind="online_dpo")
    narrow = batch.narrow(best_and_worst(batch.reward[batch.index]))
    assert narrow.index.shape == (5, 2)
    assert len(narrow.tokens) == 10 < len(batch.tokens)
    rewards = batch.reward[batch.index]
    np.testing.assert_array_equal(narrow.reward[narrow.index[:, 0]], rewards.max(axis=1))
    np.testing.assert_array_equal(narrow.reward[narrow.index[:, 1]], rewards.min(axis=1))
    all_of_them = replace(OBJECTIVES["online_dpo"], choose=None)
    monkeypatch.setitem(OBJECTIVES, "online_dpo", all_of_them)
    whole, loss_of_all = gradient_of(policy, batch, budget=10_000, kind="online_dpo")
    assert loss == pytest.approx(loss_of_all, rel=1e-5)
    assert (chosen - whole).norm() / whole.norm() < 1e-5


def test_gradient_equals_the_closed_form_of_the_naive_computation(policy: Policy) -> None:
    """-mean(A grad log pi), A = (r - rbar) - beta (k - kbar), log pi by a plain forward each."""
    batch, beta = make_batch(queries=3), 0.05
    measured, _ = gradient_of(policy, batch, budget=10_000)
    log_pi = torch.stack([naive_log_pi(policy, batch, row) for row in range(len(batch.tokens))])
    log_ref = torch.tensor([float(row.sum()) for row in batch.log_ref])
    index = torch.from_numpy(batch.index)
    k = (log_pi.detach() - log_ref)[index]
    reward = torch.from_numpy(batch.reward)[index]
    advantage = (reward - reward.mean(1, keepdim=True)) - beta * (k - k.mean(1, keepdim=True))
    policy.model.zero_grad()
    (-(advantage * log_pi[index]).mean()).backward()
    by_hand = torch.cat([p.grad.flatten() for p in policy.model.parameters()])  # type: ignore[union-attr]
    assert (measured - by_hand).norm() / by_hand.norm() < 1e-5


def naive_log_pi(policy: Policy, batch: Batch, row: int) -> torch.Tensor:
    prompt, response = batch.prompts[batch.query_of_row[row]], batch.tokens[row]
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    log_probs = policy.model(ids).logits[0].log_softmax(-1)
    positions = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return log_probs[positions, ids[0, len(prompt) :]].sum()


def test_a_step_without_finite_loss_changes_nothing(policy: Policy) -> None:
    update = PolicyUpdate(policy.model, make_config())
    before = [p.detach().clone() for p in policy.model.parameters()]
    batch = make_batch()
    batch.reward[3] = np.inf
    assert update.step(batch, 0).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert not update.optimizer.state
    assert not update.step(make_batch(), 1).skipped
    assert not all(
        torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True)
    )


def test_gradient_clipping_and_schedule_reach_the_optimiser(policy: Policy) -> None:
    config = make_config(
        max_grad_norm=1e-3, steps=10, learning_rate_schedule={"kind": "linear", "warmup_steps": 4}
    )
    update = PolicyUpdate(policy.model, config)
    result = update.step(make_batch(), 1)
    clipped = torch.cat([p.grad.flatten() for p in policy.model.parameters()])  # type: ignore[union-attr]
    assert result.metrics["grad_norm"] > 1e-3
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert update.optimizer.param_groups[0]["lr"] == pytest.approx(result.metrics["learning_rate"])
    assert 0 < result.metrics["learning_rate"] < 1e-3
