"""What holds for every member of the squared family."""

import pytest
import torch

from objectives.squared_batch import BETA, KINDS, LEARNED, batch, learning, value_and_gradients
from objectives.tree import call
from tba.objectives.base import declared
from tba.objectives.metrics import reward_metrics

every_kind = pytest.mark.parametrize("kind", KINDS)
SHIFTED = {"tb_learned_z": 1 / BETA, "dro": 1.0, "a_star_po": 1 / BETA}
"""How far one unit of reward moves the learned or estimated scalar, where that is no mean."""


def _same(first, second):
    torch.testing.assert_close(first[0].loss, second[0].loss)
    torch.testing.assert_close(first[1], second[1])


# Those whose stop-gradients make finite differences something else; their own files compare their
# gradients with closed forms.
STOPPED = ("tb_prime", "tb_tapered", "f_tb")


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith(STOPPED)])
def test_gradcheck(kind):
    inputs = batch(queries=2, samples=3, tokens=4)
    objective, settings = KINDS[kind]
    names = [name for name in declared(objective)[0] if name in LEARNED]

    def loss(*learned):
        return call(objective, inputs | dict(zip(names, learned, strict=True)), **settings).loss

    assert torch.autograd.gradcheck(loss, [inputs[name] for name in names])


@every_kind
def test_the_order_of_samples_changes_nothing(kind):
    inputs = batch()
    order = [2, 0, 3, 1]
    shuffled = learning({n: v if n == "log_z" else v[:, order] for n, v in inputs.items()})
    before, after = value_and_gradients(kind, inputs), value_and_gradients(kind, shuffled)
    torch.testing.assert_close(after[0].loss, before[0].loss)
    torch.testing.assert_close(after[0].metrics, before[0].metrics)
    torch.testing.assert_close(after[1]["log_pi"], before[1]["log_pi"][:, order])


@every_kind
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_padding_changes_nothing_whatever_it_holds(kind, garbage):
    inputs = batch()
    wide = {}
    for name, value in inputs.items():
        if value.ndim == 3:
            more = torch.full_like(value[..., :2], garbage if value.is_floating_point() else False)
            value = torch.cat([value.detach(), more], dim=-1)
        wide[name] = value
    mask = wide["mask"]
    for name, value in wide.items():
        if value.ndim == 3 and value.is_floating_point():
            wide[name] = value.where(mask, garbage)
    before, after = value_and_gradients(kind, inputs), value_and_gradients(kind, learning(wide))
    torch.testing.assert_close(after[0].loss, before[0].loss)
    torch.testing.assert_close(after[0].metrics, before[0].metrics)
    for name, gradient in after[1].items():
        narrow = gradient if name == "log_z" else gradient[..., :-2]
        torch.testing.assert_close(narrow, before[1][name])
        assert name == "log_z" or (gradient[~mask] == 0).all()


@every_kind
def test_a_batch_is_the_mean_of_its_queries(kind):
    inputs = batch()
    whole, gradients = value_and_gradients(kind, inputs)
    alone = [
        value_and_gradients(kind, learning({n: v[q : q + 1] for n, v in inputs.items()}))
        for q in range(3)
    ]
    torch.testing.assert_close(torch.stack([o.loss for o, _ in alone]).mean(), whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(torch.stack([o.metrics[name] for o, _ in alone]).mean(), value)
    for name, value in gradients.items():
        torch.testing.assert_close(torch.cat([g[name] for _, g in alone]) / 3, value)


@every_kind
def test_only_policy_and_learned_scalar_get_a_gradient(kind):
    inputs = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in batch().items()}
    objective, settings = KINDS[kind]
    output = call(objective, inputs, **settings)
    names = declared(objective)[0]
    fixed = [n for n in names if n not in LEARNED and inputs[n].is_floating_point()]
    found = torch.autograd.grad(output.loss, [inputs[n] for n in fixed], allow_unused=True)
    assert found == (None,) * len(fixed)
    assert "reward" in fixed
    assert not any(value.requires_grad for value in output.metrics.values())
    assert all(value.shape == () for value in output.metrics.values())


@every_kind
def test_a_reward_shift_moves_the_scalar_or_nothing(kind):
    inputs = batch()
    shift = torch.tensor([7.0, -3.0, 100.0], dtype=torch.float64)
    by = SHIFTED.get(kind, 0.0) * shift
    moved = inputs | {
        "reward": inputs["reward"] + shift[:, None],
        "prefix_reward": inputs["prefix_reward"] + shift[:, None, None],
        "log_z": inputs["log_z"] + by,
        "log_z_star": inputs["log_z_star"] + by[:, None],
    }
    _same(value_and_gradients(kind, learning(moved)), value_and_gradients(kind, inputs))


@every_kind
def test_bfloat16_is_computed_in_float32(kind):
    low = {
        n: v.bfloat16() if v.ndim == 3 and v.is_floating_point() else v for n, v in batch().items()
    }
    output, _ = value_and_gradients(
        kind, learning({n: v.float() if v.dtype == torch.float64 else v for n, v in low.items()})
    )
    assert output.loss.dtype == torch.float32
    exact, _ = value_and_gradients(kind, batch())
    torch.testing.assert_close(output.loss.double(), exact.loss, rtol=0.05, atol=0.05)


@every_kind
def test_kl_is_reported_exactly_where_there_is_a_reference(kind):
    inputs = batch()
    output, _ = value_and_gradients(kind, inputs)
    names = declared(KINDS[kind][0])[0]
    assert {"reward_mean", "reward_std", "equal_reward_share"} <= set(output.metrics)
    assert ("kl" in output.metrics) == ("log_ref" in names)
    if "log_ref" in names:
        difference = inputs["log_pi"] - inputs["log_ref"]
        torch.testing.assert_close(output.metrics["kl"], difference.detach().sum(dim=-1).mean())


def test_reward_metrics_by_hand():
    # Query 1: rewards 0 and 2, mean 1, deviation 1. Query 2: 3 and 3, mean 3, deviation 0.
    reward = torch.tensor([[0.0, 2.0], [3.0, 3.0]], requires_grad=True)
    kl = torch.tensor([[1.0, 2.0], [3.0, 6.0]], requires_grad=True)
    found = reward_metrics(reward, kl)
    expected = {"kl": 3.0, "reward_mean": 2.0, "reward_std": 0.5, "equal_reward_share": 0.5}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in found.values())
    assert "kl" not in reward_metrics(reward)
