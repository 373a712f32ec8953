import json
import sys

import pytest
import torch
from benchmarks.sources import BETA, QUERIES, SOURCES, TREE, Paths, Sampler, by_source, make_world

from benchmarks import posterior
from tba.config.objectives import GVPOConfig, KimiConfig
from tba.objectives.base import INPUTS, Objective, ObjectiveOutput


def _inputs(names):
    world, paths = make_world(1), Paths()
    draws = Sampler(world, paths, 1, steps=1, advantages=True).draw(0, world.log_ref)
    return posterior.Learner(world, paths).inputs(names, draws, 0.25)


def test_every_input_of_the_contract_is_there_in_its_shape():
    found = _inputs(tuple(INPUTS))
    rows = QUERIES * len(SOURCES)
    shapes = {"[query, sample, token]": (rows, 16, 5), "[query, sample]": (rows, 16)}
    shapes |= {"[query]": (rows,), "[]": ()}
    for name, meaning in INPUTS.items():
        shape = shapes.get(meaning.split("; ")[-1])
        if shape is None:
            assert isinstance(found[name], int | float)
        else:
            assert found[name].shape == shape, name
    # The policy starts at the reference, and so does whatever samples but the uniform source.
    torch.testing.assert_close(found["log_pi"], found["log_ref"])
    torch.testing.assert_close(found["log_old"], found["log_ref"])
    torch.testing.assert_close(found["log_stop"], found["log_ref_stop"])
    learned = [name for name, value in found.items() if getattr(value, "requires_grad", False)]
    assert learned == ["log_pi", "value", "log_z", "log_stop"]


def test_the_last_prefix_reward_of_a_response_that_ends_is_its_reward():
    found = _inputs(("prefix_reward", "reward", "mask", "log_stop", "log_pi", "finished"))
    last = (found["mask"].sum(-1) - 1).unsqueeze(-1)
    stop, taken, reward = (
        found[name].gather(-1, last).squeeze(-1) for name in ("log_stop", "log_pi", "prefix_reward")
    )
    ended = found["finished"]
    assert 0 < ended.double().mean() < 1
    assert ended[found["mask"].sum(-1) < TREE.depth].all()
    torch.testing.assert_close(stop[ended], taken[ended])
    assert (stop != taken)[~ended].all()
    torch.testing.assert_close(reward[ended], found["reward"][ended])


def test_a_preparation_sees_the_queries_of_one_seed_and_source():
    seen = []

    def prepare(reward, mean_reward):
        seen.append(reward.shape)
        torch.testing.assert_close(mean_reward, reward.mean())
        return {"centred": reward - mean_reward}

    def loss(log_pi, mask, centred, *, beta):
        return ObjectiveOutput((torch.where(mask, log_pi, 0.0).sum(-1) * centred * beta).mean(), {})

    method = posterior.Method(Objective(loss, prepare, ("centred",)), {"beta": 2.0}, {})
    inputs = _inputs(method.names())
    found = method.loss(inputs)
    assert seen == [(QUERIES, 16)] * len(SOURCES)
    reward = inputs["reward"].view(len(SOURCES), QUERIES, 16)
    centred = (reward - reward.mean((1, 2), keepdim=True)).flatten(0, 1)
    sums = torch.where(inputs["mask"], inputs["log_pi"], 0.0).sum(-1)
    torch.testing.assert_close(found, (sums * centred * 2.0).mean() * len(SOURCES))


def test_beta_is_that_of_the_benchmark_where_it_is_the_kl_to_the_reference():
    assert posterior.method_of("tb").settings["beta"] == BETA
    assert posterior.method_of("grpo").settings["beta"] == BETA
    assert posterior.method_of("ppo").settings_of_preparation["beta"] == BETA
    assert posterior.method_of("gvpo").settings == {"beta": GVPOConfig().beta.value}
    assert posterior.method_of("kimi").settings == {"tau": KimiConfig().tau}


@pytest.mark.parametrize("kind", posterior.OBJECTIVES)
def test_every_objective_runs_and_moves_the_policy_with_every_source(kind):
    world = make_world(1)
    moved = posterior.train(kind, world, seeds=1, steps=2) - world.log_ref
    assert moved.isfinite().all()
    assert (by_source(moved, 1).abs().amax(dim=(0, 2, 3, 4)) > 0).all()


def test_the_posterior_measures_as_it_should():
    world = make_world(2)
    found = posterior.measure(world.log_posterior, world, 2)
    log_ref = TREE.response_log_probs(world.log_ref.double())
    zeros = torch.zeros(2, len(SOURCES)).double()
    torch.testing.assert_close(found["total_variation"], zeros)
    torch.testing.assert_close(found["kl"], zeros)
    # Equation (1) at its optimum is beta log Z: E r = beta (log Z + KL(pi* || ref)).
    star = world.log_posterior
    kl = (star.exp() * (star - log_ref)).sum(1)
    expected = BETA * (world.log_z + kl)
    torch.testing.assert_close(found["reward"].mean(), expected.mean())


def test_a_short_run_comes_nearer_in_every_column_and_is_written_down(
    tmp_path, monkeypatch, capsys
):
    arguments = ["--objectives", "tb", "--steps", "30", "--seeds", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["posterior", *arguments])
    posterior.main()
    results = json.loads((tmp_path / "posterior.json").read_text())["results"]
    for source in SOURCES:
        before, after = (
            results[name]["total_variation"][source]["mean"] for name in ("(the reference)", "tb")
        )
        assert after < before
    assert f"| objective | {' | '.join(SOURCES)} |" in capsys.readouterr().out


def test_a_second_call_goes_on_where_the_first_one_ended(tmp_path, monkeypatch):
    trained = []
    train = posterior.train
    monkeypatch.setattr(
        posterior, "train", lambda kind, *rest: trained.append(kind) or train(kind, *rest)
    )
    for kinds, steps in (("tb", "2"), ("tb,rloo", "2"), ("tb", "3")):
        arguments = ["--objectives", kinds, "--steps", steps, "--seeds", "1"]
        monkeypatch.setattr(sys, "argv", ["posterior", *arguments, "--out", str(tmp_path)])
        posterior.main()
    assert trained == ["tb", "rloo", "tb"], "other settings are another table"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tb", "tb_learned_z", "subtb"])
def test_trajectory_balance_finds_the_posterior_whoever_sampled(kind):
    world = make_world(1)
    logits = posterior.train(kind, world, seeds=1, steps=posterior.STEPS)
    log_pi = TREE.response_log_probs(posterior.log_probs_of(logits.double()))
    found = posterior.measure(log_pi, world, 1)["total_variation"]
    assert found.shape == (1, len(SOURCES))
    assert (found <= 0.02).all(), found
