"""The trainer's box in whole inline runs: against a loop written by hand, and its promises."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tba
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.errors import DivergedError
from tba.objectives import OBJECTIVES, Objective
from tba.objectives.base import ObjectiveOutput
from tba.policy.loading import load_policy
from tba.run.summary import Ending, Summary
from tba.searcher import Tickets
from tba.tasks import load_task
from tba.trainer import Trainer
from tba.update import PolicyUpdate
from tiny_runs import final_tensors, metrics, rollouts, tiny_config, train

CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    """Record each batch with the step's number and the weights before it."""
    seen = []
    real = PolicyUpdate.step

    def step(self, batch, number):
        weights = {name: w.detach().clone() for name, w in self.model.named_parameters()}
        seen.append((number, batch, weights))
        return real(self, batch, number)

    monkeypatch.setattr(PolicyUpdate, "step", step)
    return seen


def naive_log_probs(model, prompt, tokens, temperature):
    """Return a response's token log-probabilities from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]


def synchronous_loop(config, model_folder):
    """Train as lockstep with k = 1, m = 1, S = K does, in plain torch."""
    policy = load_policy(model_folder, config.model, device=CPU, dtype=torch.float32)
    reference = load_policy(model_folder, config.model, device=CPU, dtype=torch.float32).model
    task = load_task(config.task, policy.tokenizer)
    tickets = Tickets(task.train, config.search.queries_per_batch, config.seed)
    sampling = Sampling(
        config.search.samples_per_query,
        config.search.temperature,
        config.search.max_completion_length,
    )
    engine, temperature = TorchEngine(policy.model, policy.eos_ids), sampling.temperature
    settings, beta = config.trainer, config.objective.beta.value
    optimizer = torch.optim.AdamW(
        policy.model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )
    for step in range(settings.steps):
        queries = tickets.take(step)
        found = engine.generate(queries, sampling, tickets.generator(step))
        losses = []
        for query, responses in zip(queries, found, strict=True):
            assert len({tuple(r.tokens) for r in responses}) == len(responses)
            texts = policy.tokenizer.batch_decode(
                [r.tokens for r in responses], skip_special_tokens=True
            )
            log_pi, log_ref = (
                torch.stack(
                    [
                        naive_log_probs(model, query.prompt_ids, r.tokens, temperature).sum()
                        for r in responses
                    ]
                )
                for model in (policy.model, reference)
            )
            reward = torch.tensor([sum(c.isdigit() for c in t) - 0.25 * len(t) for t in texts])
            log_z = (log_ref - log_pi + reward / beta).mean().detach()  # (4)
            residual = log_z + log_pi - log_ref.detach() - reward / beta
            losses.append(residual.square().mean())  # (5)
        optimizer.zero_grad()
        (beta / 2 * torch.stack(losses).mean()).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), settings.max_grad_norm)
        optimizer.step()
    return dict(policy.model.named_parameters())


def test_lockstep_equals_a_synchronous_loop_written_by_hand(tmp_path):
    config = tiny_config(
        tmp_path,
        buffer={"initial_samples": 0, "on_policy_prob": 1.0},
        search={"temperature": 0.8},
        sync={"mode": "lockstep", "sync_every": 1},
        trainer={"steps": 5, "weight_decay": 0.01, "adam_epsilon": 1e-6, "max_grad_norm": 0.5},
    )
    train(tmp_path, config)
    run = tmp_path / "run"
    trained, by_hand = final_tensors(run), synchronous_loop(config, run / "model")
    start = load_policy(run / "model", config.model, device=CPU, dtype=torch.float32).model
    moved = dict(start.named_parameters())
    compared = 0
    for name, weight in by_hand.items():
        if (got := trained.get(f"model.safetensors/{name}")) is None:
            continue  # tied to another
        torch.testing.assert_close(got, weight.detach(), rtol=0, atol=1e-5)
        compared += bool((moved[name] - weight).abs().max() > 3e-3)
    assert compared >= 5, "training moved far more than the tolerance"
    assert all(line["grad_norm"] > 0.01 for line in metrics(run))
    assert {line["staleness_max"] for line in metrics(run)} == {0}


@pytest.mark.parametrize("k", [1, 2, 5])
def test_barrier_staleness_lies_between_k_and_2k_minus_1(tmp_path, k):
    config = tiny_config(
        tmp_path,
        buffer={"on_policy_prob": 1.0},
        sync={"mode": "barrier", "sync_every": k},
        trainer={"steps": 5 * k},
    )
    train(tmp_path, config)
    lines = metrics(tmp_path / "run")[k:]  # in the first round there are only initial samples
    assert len(lines) == 4 * k
    assert min(line["staleness_min"] for line in lines) == k
    assert max(line["staleness_max"] for line in lines) == 2 * k - 1
    assert np.mean([line["staleness_mean"] for line in lines]) == pytest.approx((3 * k - 1) / 2)
    for line in lines:
        expected = k + (line["step"] - 1) % k
        assert line["staleness_min"] == line["staleness_max"] == expected


@pytest.mark.parametrize("k", [1, 3])
def test_lockstep_staleness_lies_between_0_and_k_minus_1(tmp_path, k):
    config = tiny_config(
        tmp_path,
        buffer={"on_policy_prob": 1.0},
        sync={"mode": "lockstep", "sync_every": k},
        trainer={"steps": 3 * k},
    )
    train(tmp_path, config)
    for line in metrics(tmp_path / "run"):
        assert line["staleness_min"] == line["staleness_max"] == (line["step"] - 1) % k


def test_reference_resets_reach_batches_and_searchers(tmp_path, steps):
    rho = 3
    config = tiny_config(
        tmp_path,
        buffer={"on_policy_prob": 0.5},
        sync={"reference_reset_every": rho, "sync_every": 1},
        trainer={"steps": 10},
    )
    train(tmp_path, config)
    weights = {number: before for number, _, before in steps}
    reference = load_policy(tmp_path / "run/model", config.model, device=CPU, dtype=torch.float32)
    recomputed = 0
    for number, batch, _ in steps:
        version = number // rho * rho
        assert (batch.reference_version == version).all(), "no batch mixes references"
        with torch.no_grad():
            for name, weight in reference.model.named_parameters():
                weight.copy_(weights[version][name])
            for row in range(len(batch.tokens)):
                prompt = batch.prompts[batch.query_of_row[row]]
                direct = naive_log_probs(reference.model, prompt, batch.tokens[row], 1.0)
                np.testing.assert_allclose(batch.log_ref[row], direct, rtol=1e-4, atol=1e-5)
                recomputed += batch.policy_version[row] < version
    assert recomputed > 0
    for row in rollouts(tmp_path / "run"):
        assert row["reference_version"] == row["policy_version"] // rho * rho


def test_bounds_on_staleness_and_reuse_hold_over_a_run(tmp_path, steps):
    config = tiny_config(
        tmp_path,
        buffer={"on_policy_prob": 0.3, "max_staleness": 3, "max_reuse": 2},
        sync={"sync_every": 2},
        trainer={"steps": 15},
    )
    train(tmp_path, config)
    assert max(line["staleness_max"] for line in metrics(tmp_path / "run")) <= 3
    uses = {}
    for number, batch, _ in steps:
        assert (number - batch.policy_version <= 3).all()
        for row, tokens in enumerate(batch.tokens):
            prompt = tuple(batch.prompts[batch.query_of_row[row]])
            key = (prompt, tuple(tokens), int(batch.policy_version[row]))
            uses.setdefault(key, set()).add(number)
    assert max(map(len, uses.values())) == 2


@pytest.mark.parametrize("mode", ["barrier", "lockstep"])
def test_where_reuse_is_bounded_rounds_of_their_own_bring_new_samples(tmp_path, steps, mode):
    config = tiny_config(
        tmp_path,
        buffer={"on_policy_prob": 1.0, "max_reuse": 1},
        sync={"mode": mode, "sync_every": 4, "searches_per_round": 1, "timeout_s": 30.0},
        trainer={"steps": 8},
    )
    train(tmp_path, config)
    assert len(steps) == 8
    searched = {row["ticket"] for row in rollouts(tmp_path / "run")}
    assert len(searched) > 2 * 2, "two rounds, of one batch each and lane, were not enough"


def poison(monkeypatch, bad):
    """Turn the gradient into NaN in the steps (counted from 0) that `bad` names."""
    real, at = OBJECTIVES["tb"].loss, [-1]
    update = PolicyUpdate.step

    def step(self, batch, number):
        at[0] = number
        return update(self, batch, number)

    def objective(log_pi, log_ref, mask, reward, *, beta):
        output = real(log_pi, log_ref, mask, reward, beta=beta)
        factor = float("nan") if bad(at[0]) else 1.0
        return ObjectiveOutput(loss=output.loss * factor, metrics=output.metrics)

    monkeypatch.setitem(OBJECTIVES, "tb", Objective(objective))
    monkeypatch.setattr(PolicyUpdate, "step", step)


def test_steps_without_a_finite_gradient_change_nothing_and_are_counted(
    tmp_path, monkeypatch, steps
):
    poison(monkeypatch, lambda number: number in (2, 3, 5))
    summary = train(tmp_path, tiny_config(tmp_path, trainer={"steps": 8, "max_bad_steps": 3}))
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FINISHED, 8, 3)
    lines = metrics(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 0, 1, 0, 0]
    assert lines[2]["loss"] is None
    for number, same in ((1, False), (2, True), (3, True), (4, False), (5, True)):
        before, after = steps[number][2], steps[number + 1][2]
        assert all(torch.equal(before[name], after[name]) for name in before) is same


def test_a_diverged_run_ends_with_a_reason_and_can_be_resumed(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, trainer={"steps": 8, "max_bad_steps": 3})
    with monkeypatch.context() as patch:
        poison(patch, lambda number: number >= 2)
        with pytest.raises(DivergedError, match=r"^3 steps in a row .* step 5\)"):
            train(tmp_path, config)
    run = tmp_path / "run"
    summary = Summary.read(run / "summary.json")
    assert (summary.ended, summary.steps, summary.bad_steps) == (Ending.FAILED, 5, 3)
    assert "lower trainer.learning_rate" in summary.detail
    assert len(metrics(run)) == 5
    resumed = tba.resume(run, progress=False)
    assert (resumed.ended, resumed.steps, resumed.bad_steps) == (Ending.FINISHED, 8, 3)
    assert [line["step"] for line in metrics(run)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("runtime", "mode", "waits"),
    [("local", "free", True), ("inline", "free", False), ("local", "barrier", False)],
)
def test_a_resumed_run_waits_for_the_first_delivery_where_searchers_need_time_to_start(
    tmp_path, runtime, mode, waits
):
    trainer = Trainer.__new__(Trainer)
    trainer._config = tiny_config(tmp_path, runtime={"kind": runtime}, sync={"mode": mode})
    trainer._update = SimpleNamespace(gradients_are_sent=False)
    trainer._intake = SimpleNamespace(arrivals=SimpleNamespace(scored=0))
    trainer.version = 5
    assert trainer._filled() is not waits
    trainer._intake.arrivals.scored = 1
    assert trainer._filled()
