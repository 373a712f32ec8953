"""Inputs by name: each is what it says, for a micro-batch and for the whole batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tba.config import Config
from tba.config.objectives import CustomObjectiveConfig
from tba.errors import ConfigError, UserCodeError
from tba.inputs import Inputs, StepFacts, slices
from tba.objectives import INPUTS, Objective, ObjectiveOutput, load_objective
from tba.objectives.base import check_inputs, declared
from tba.policy.loading import Policy
from tba.records import Batch
from tba.update import PolicyUpdate, micro_batches
from test_update import make_batch, make_config, naive_log_pi

FACTS = StepFacts(mean_reward=0.25, mean_tokens=2.5, progress=0.5, prepared={})
ALL = "log_pi, mask, reward, finished, log_ref, log_mu, log_old, value, log_z, log_stop, "
ALL += "log_ref_stop, prefix_reward, step_advantage, log_z_star, mean_reward, mean_tokens, "
ALL += "max_tokens, progress"


def everything(  # noqa: PLR0917  # all that there is
               log_pi, mask, reward, finished, log_ref, log_mu, log_old, value, log_z, log_stop,
               log_ref_stop, prefix_reward, step_advantage, log_z_star, mean_reward, mean_tokens,
               max_tokens, progress):  # fmt: skip
    raise NotImplementedError


def make_inputs(policy: Policy, objective: Objective, **trainer: object) -> Inputs:
    return Inputs(policy.model, objective, make_config(**trainer), policy.eos_ids)


def with_extras(batch: Batch) -> Batch:
    """Give each row a number of its own for each name that searchers compute."""
    names = ("log_ref_stop", "prefix_reward", "step_advantage", "log_z_star")
    return replace(
        batch,
        extras={
            name: tuple(
                np.full(len(tokens), 100 * n + row, dtype=np.float32)
                for row, tokens in enumerate(batch.tokens)
            )
            for n, name in enumerate(names)
        },
    )


def test_the_contract_lists_every_input_and_this_test_asks_for_all() -> None:
    assert set(INPUTS) == set(ALL.split(", ")) == set(declared(everything)[0])


def test_each_input_is_what_its_name_says(policy: Policy) -> None:
    inputs = make_inputs(policy, Objective(everything))
    batch = with_extras(make_batch(queries=3))
    found = inputs.of_loss(batch, FACTS)
    assert set(found) == set(INPUTS)
    for q, rows in enumerate(batch.index):
        for j, row in enumerate(rows):
            length = len(batch.tokens[row])
            assert found["mask"][q, j].sum() == length
            for name in ("log_ref", "log_mu"):
                assert found[name][q, j, :length].tolist() == getattr(batch, name)[row].tolist()
            for name in ("log_ref_stop", "prefix_reward", "step_advantage"):
                assert found[name][q, j, :length].tolist() == batch.extras[name][row].tolist()
            assert found["log_z_star"][q, j] == batch.extras["log_z_star"][row][0]
            assert found["reward"][q, j] == batch.reward[row]
            assert found["finished"][q, j] == batch.finished[row]
            torch.testing.assert_close(
                found["log_pi"][q, j].sum(), naive_log_pi(policy, batch, row), rtol=1e-5, atol=1e-5
            )
    # the anchor is the policy itself until that moves on
    torch.testing.assert_close(found["log_old"], found["log_pi"].detach(), rtol=1e-5, atol=1e-5)
    assert (found["mean_reward"], found["progress"], found["max_tokens"]) == (0.25, 0.5, 6)
    assert found["mean_tokens"] == 2.5


def test_log_stop_is_the_log_probability_of_ending_before_each_token(policy: Policy) -> None:
    found = make_inputs(policy, Objective(everything)).of_loss(
        with_extras(make_batch(queries=2)), FACTS
    )
    batch = make_batch(queries=2)
    row = int(batch.index[1, 0])
    prompt, tokens = batch.prompts[1], batch.tokens[row]
    for at in range(len(tokens)):
        ids = torch.from_numpy(np.concatenate([prompt, tokens[:at]]).astype(np.int64))[None]
        log_probs = policy.model(ids).logits[0, -1].log_softmax(-1)
        expected = log_probs[list(policy.eos_ids)].logsumexp(-1)
        torch.testing.assert_close(found["log_stop"][1, 0, at], expected, rtol=1e-5, atol=1e-5)


def test_heads_start_at_zero_read_the_right_states_and_only_the_value_moves_the_body(
    policy: Policy,
) -> None:
    inputs = make_inputs(policy, Objective(everything))
    batch = with_extras(make_batch(queries=2))
    assert (inputs.of_loss(batch, FACTS)["value"] == 0).all()
    with torch.no_grad():
        for weight in inputs.heads.parameters():
            weight.fill_(0.5)
    found = inputs.of_loss(batch, FACTS)
    row = int(batch.index[1, 2])
    prompt, tokens = batch.prompts[1], batch.tokens[row]
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    states = policy.model.base_model(ids).last_hidden_state[0]
    value = 0.5 * states[len(prompt) - 1 : -1].sum(-1) + 0.5
    torch.testing.assert_close(found["value"][1, 2, : len(tokens)], value, rtol=1e-4, atol=1e-5)
    log_z = 0.5 * states[: len(prompt)].mean(0).sum() + 0.5
    torch.testing.assert_close(found["log_z"][1], log_z, rtol=1e-4, atol=1e-5)
    for name, reaches_the_body in (("value", True), ("log_z", False)):
        policy.model.zero_grad()
        found = inputs.of_loss(batch, FACTS)
        found[name].sum().backward()
        moved = any(p.grad is not None and p.grad.any() for p in policy.model.parameters())
        assert moved is reaches_the_body


def test_the_anchor_follows_every_so_many_steps(policy: Policy) -> None:
    inputs = make_inputs(policy, Objective(everything), anchor_every=2)
    batch = with_extras(make_batch(queries=2))
    before = inputs.of_loss(batch, FACTS)["log_pi"].detach()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(1.5)
    moved = inputs.of_loss(batch, FACTS)
    assert (moved["log_pi"] - before).abs().max() > 1e-3
    assert inputs.anchor is not None
    inputs.anchor.follow(policy.model, 1)
    torch.testing.assert_close(
        inputs.of_loss(batch, FACTS)["log_old"], before, rtol=1e-5, atol=1e-5
    )
    inputs.anchor.follow(policy.model, 2)
    found = inputs.of_loss(batch, FACTS)
    torch.testing.assert_close(found["log_old"], found["log_pi"].detach(), rtol=1e-5, atol=1e-5)


def whitened(value, mask, reward, *, scale):
    """A preparation that depends on the whole batch: it tells which query a row belongs to."""
    mean = (reward.sum() + value.sum()) / reward.numel()
    return {"advantage": scale * (reward - mean).unsqueeze(-1).expand(mask.shape)}


def prepared_loss(log_pi, mask, advantage, *, other):
    loss = -(torch.where(mask, log_pi, 0.0) * advantage).sum(-1).mean() * other
    return ObjectiveOutput(loss=loss, metrics={})


def test_a_preparation_sees_the_whole_batch_and_micro_batches_get_their_parts(
    policy: Policy,
) -> None:
    objective = Objective(prepared_loss, prepare=whitened, prepared=("advantage",))
    assert objective.inputs() == ("log_pi", "mask")
    assert objective.inputs_of_preparation() == ("value", "mask", "reward")
    inputs = make_inputs(policy, objective)
    batch = make_batch(queries=5)
    micros = list(micro_batches(batch, 30))
    assert len(micros) > 2
    whole = inputs.prepare(batch, micros, FACTS, {"scale": 2.0, "other": 1.0})["advantage"]
    reward = torch.from_numpy(batch.reward[batch.index])
    torch.testing.assert_close(whole[..., 0], 2.0 * (reward - reward.mean()))
    for queries in micros:
        longest = max(len(t) for t in batch.select(queries).tokens)
        part = slices({"advantage": whole}, queries, longest)["advantage"]
        assert part.shape[2] == longest
        torch.testing.assert_close(part[..., 0], whole[queries][..., 0])


def test_micro_batches_with_a_preparation_give_the_one_batch_gradient(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = Objective(prepared_loss, prepare=whitened, prepared=("advantage",))
    monkeypatch.setattr("tba.update.load_objective", lambda section: objective)
    monkeypatch.setattr("tba.update.settings_at", lambda *arguments: {"scale": 2.0, "other": 1.0})
    gradients = []
    for budget in (10_000, 30):
        config = make_config(micro_batch_tokens=budget, max_grad_norm=1e9)
        update = PolicyUpdate(policy.model, config)
        update.optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
        update.step(make_batch(), 0)
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.model.parameters()])  # type: ignore[union-attr]
        )
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 1e-5


MINE = """
from tba.objectives import ObjectiveOutput

def mine(log_pi, mask, reward, *, scale=2.0):
    centred = reward - reward.mean(dim=1, keepdim=True)
    log_prob = log_pi.where(mask, 0.0).sum(-1)
    return ObjectiveOutput(loss=-scale * (centred * log_prob).mean(), metrics={})

def lost(log_pi, log_nu):
    ...
"""


def test_an_objective_of_ones_own_is_a_function_in_a_file(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = make_config()
    section = {"kind": "custom", "function": f"{tmp_path / 'mine.py'}:mine"}
    config = Config.model_validate({**config.model_dump(), "objective": section})
    batch = make_batch(queries=2)
    index = torch.from_numpy(batch.index)
    log_pi = torch.stack([naive_log_pi(policy, batch, row) for row in range(len(batch.tokens))])
    reward = torch.from_numpy(batch.reward)[index]
    expected = -2.0 * ((reward - reward.mean(dim=1, keepdim=True)) * log_pi[index]).mean()
    result = PolicyUpdate(policy.model, config).step(batch, 0)
    assert result.metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_an_objective_that_names_what_there_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError, match=r"mine\.py:lost asks for an input log_nu, which does"):
        load_objective(CustomObjectiveConfig(function=f"{tmp_path / 'mine.py'}:lost"))
    check_inputs(Objective(everything), "everything")


CLUMSY = """
import torch
from tba.objectives import ObjectiveOutput

def bare(log_pi, mask): return log_pi.where(mask, 0.0).mean()
def raises(log_pi, mask): raise ValueError("my bug")
def detached(log_pi, mask): return ObjectiveOutput(log_pi.detach().mean(), {})
def long_metric(log_pi, mask):
    loss = log_pi.where(mask, 0.0).mean()
    return ObjectiveOutput(loss, {"kl_of_each": log_pi})
def reserved(log_pi, mask):
    return ObjectiveOutput(log_pi.where(mask, 0.0).mean(), {"step": log_pi.detach().mean()})
def with_metrics(log_pi, mask, metrics):
    output = ObjectiveOutput(log_pi.where(mask, 0.0).mean(), {})
    object.__setattr__(output, "metrics", metrics)  # the tests check types where users do not
    return output
def no_metrics(log_pi, mask): return with_metrics(log_pi, mask, None)
def huge_metric(log_pi, mask): return with_metrics(log_pi, mask, {"huge": 10**400})
def imaginary(log_pi, mask): return ObjectiveOutput(log_pi.where(mask, 0.0).mean() * 1j, {})
def in_place(log_pi, mask):
    p = log_pi.exp()
    loss = (p * p).mean()
    p.mul_(0.0)
    return ObjectiveOutput(loss, {})
def of_nothing(mask): return ObjectiveOutput(torch.zeros((), requires_grad=True) * 1, {})
def of_others(log_pi, mask, step_advantage): ...
def fine(log_pi, mask, *, scale):
    loss = scale * log_pi.where(mask, 0.0).mean()
    return ObjectiveOutput(loss, {"twice": 2.0, "loss": loss * 0 + 99, "reward_mean": 99})
"""


def custom(tmp_path: Path, name: str, **settings: float) -> Config:
    (tmp_path / "mine.py").write_text(CLUMSY)
    section = {"kind": "custom", "function": f"{tmp_path / 'mine.py'}:{name}", "settings": settings}
    return Config.model_validate({**make_config().model_dump(), "objective": section})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", r"mine\.py:bare returned a Tensor, expected tba\.objectives\.ObjectiveOutput"),
        ("raises", r"mine\.py:raises failed: ValueError: my bug"),
        ("detached", r"mine\.py:detached returned a loss that is no scalar tensor with gradient"),
        ("long_metric", r"metric kl_of_each .* is no single number"),
        ("reserved", r"calls a metric step, which every line has: rename it"),
        ("no_metrics", r"returned a NoneType as metrics, expected a dictionary of numbers"),
        ("huge_metric", r"metric huge .* is no single number"),
        ("imaginary", r"returned a loss of torch\.complex64: make it a real number"),
        ("in_place", r"the gradient of the objective .*in_place failed: RuntimeError: one of the"),
        ("of_nothing", r"of_nothing does not depend on the policy: compute it from log_pi"),
    ],
)
def test_what_goes_wrong_in_ones_own_objective_is_said_in_a_sentence(
    policy: Policy, tmp_path: Path, name: str, message: str
) -> None:
    update = PolicyUpdate(policy.model, custom(tmp_path, name))
    with pytest.raises(UserCodeError, match=message):
        update.step(make_batch(queries=2), 0)


def test_a_function_that_does_not_name_its_parameters_is_refused() -> None:
    section = {"kind": "custom", "function": "builtins:min"}
    config = Config.model_validate({**make_config().model_dump(), "objective": section})
    with pytest.raises(ConfigError, match=r"builtins:min does not say what its parameters are"):
        load_objective(config.objective)


def test_settings_of_ones_own_objective_come_from_the_configuration(
    policy: Policy, tmp_path: Path
) -> None:
    batch = make_batch(queries=2)
    once, twice = (
        PolicyUpdate(policy.model, custom(tmp_path, "fine", scale=scale)).step(batch, 0).metrics
        for scale in (1.0, 2.0)
    )
    assert twice["grad_norm"] == pytest.approx(2 * once["grad_norm"], rel=0.2)  # one step later
    assert once["twice"] == 2.0
    assert once["loss"] < 0, "the trainer's own numbers are not overwritten"
    assert once["reward_mean"] == pytest.approx(batch.reward[batch.index].mean(), rel=1e-5)
    with pytest.raises(ConfigError, match=r"needs a value for scale: set objective\.settings\.sc"):
        PolicyUpdate(policy.model, custom(tmp_path, "fine"))
    with pytest.raises(ConfigError, match=r"asks for step_advantage, .*kind = vineppo alone"):
        PolicyUpdate(policy.model, custom(tmp_path, "of_others"))
    with pytest.raises(ConfigError, match=r"names size, but .*mine\.py:fine has no such .* scale"):
        PolicyUpdate(policy.model, custom(tmp_path, "fine", scale=1, size=2))
