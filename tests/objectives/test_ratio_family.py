"""What holds for every objective with a ratio, a policy gradient or a value, whatever its kind."""

import pytest
import torch

from ratio_objectives import BATCH_ONLY, CASES, batch, grad, with_gradient
from tba.config.objectives.beta import ConstantBeta
from tba.objectives.base import check_inputs, declared

KINDS = pytest.mark.parametrize("kind", CASES)
FULL_GRADIENT = ("grpo", "dr_grpo", "gspo", "m2po", "decoupled_ppo", "vineppo", "ppo")
FULL_GRADIENT += ("reinforce", "rloo", "rloo_proximal", "asymre")
"""No stop-gradient on a function of `log_pi` or `value`: finite differences agree."""
SHIFT_INVARIANT = ("grpo", "dr_grpo", "gspo", "cispo", "tis", "icepop", "m2po", "decoupled_ppo")
SHIFT_INVARIANT += ("rloo", "rloo_proximal", "asymre")
CLIPPING = tuple(kind for kind in CASES if kind not in ("reinforce", "rloo", "asymre", "a3c"))


def _gradients(kind, inputs):
    """Return the gradient for each input that should have one."""
    arguments = CASES[kind].arguments(inputs)
    loss = CASES[kind].of(arguments).loss
    return {name: grad(loss, arguments[name]) for name in ("log_pi", "value") if name in arguments}


def _map(inputs, change):
    """Change every [query, sample, ...] tensor; `log_pi` and `value` carry gradient again."""
    return with_gradient(
        {
            name: part if name in BATCH_ONLY else change(name, part.detach())
            for name, part in inputs.items()
        }
    )


@KINDS
def test_section_and_function_name_the_same_settings(kind):
    case = CASES[kind]
    names = set(declared(case.loss)[1])
    if case.prepare is not None:
        names |= set(declared(case.prepare)[1])
    assert set(case.config.model_fields) == names | {"kind"} | set(case.searcher)
    assert case.config().kind == kind
    check_inputs(case.objective, kind)


@KINDS
def test_section_s_defaults_run(kind):
    case = CASES[kind]
    values = dict(case.config())
    if isinstance(values.get("beta"), ConstantBeta):
        values["beta"] = values["beta"].value
    settings = {name: values[name] for name in declared(case.loss)[1]}
    output = case.loss(**case.arguments(batch()), **settings)
    assert output.loss.shape == ()
    assert output.loss.isfinite()


@KINDS
def test_metrics_are_detached_scalars_with_the_common_names(kind):
    arguments = CASES[kind].arguments(batch())
    metrics = CASES[kind].of(arguments).metrics
    expected = {"reward_mean", "reward_std", "equal_reward_share"}
    expected |= {"kl"} if "log_ref" in arguments else set()
    expected |= {"clipped_share", "ratio_mean"} if kind in CLIPPING else set()
    assert expected <= set(metrics)
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("kind", CLIPPING)
def test_this_batch_clips_some_and_not_all(kind):
    assert 0 < CASES[kind](batch()).metrics["clipped_share"] < 1


@pytest.mark.parametrize("kind", FULL_GRADIENT)
def test_gradcheck(kind):
    arguments = CASES[kind].arguments(batch())
    names = [name for name in ("log_pi", "value") if name in arguments]

    def loss(*given):
        return CASES[kind].of(arguments | dict(zip(names, given, strict=True))).loss

    assert torch.autograd.gradcheck(loss, [arguments[name] for name in names])


@KINDS
def test_the_order_of_samples_does_not_matter(kind):
    inputs, order = batch(), [2, 0, 3, 1]
    moved = _map(inputs, lambda _, part: part[:, order])
    before, after = CASES[kind](inputs), CASES[kind](moved)
    torch.testing.assert_close(before.loss, after.loss)
    for name, value in before.metrics.items():
        torch.testing.assert_close(value, after.metrics[name])
    after = _gradients(kind, moved)
    for name, gradient in _gradients(kind, inputs).items():
        torch.testing.assert_close(gradient[:, order], after[name])


@KINDS
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_padding_changes_nothing_whatever_it_holds(kind, garbage):
    inputs = batch()
    mask = inputs["mask"]

    def widen(name, part):
        if name == "reward":
            return part
        noise = torch.full((*mask.shape[:2], 2), garbage, dtype=torch.float64)
        if name == "mask":
            return torch.cat([part, torch.zeros_like(noise, dtype=torch.bool)], dim=-1)
        return torch.cat([part.where(mask, garbage), noise], dim=-1)

    wide = _map(inputs, widen)
    torch.testing.assert_close(CASES[kind](inputs).loss, CASES[kind](wide).loss)
    before, after = _gradients(kind, inputs), _gradients(kind, wide)
    for name, gradient in before.items():
        torch.testing.assert_close(after[name][..., :-2], gradient)
        assert (after[name][..., :-2][~mask] == 0).all()
        assert (after[name][..., -2:] == 0).all()


@KINDS
def test_a_batch_is_the_mean_of_its_queries_alone(kind):
    case = CASES[kind]
    arguments = case.arguments(batch())
    whole = case.of(arguments)
    parts = []
    for query in range(3):
        alone = with_gradient(
            {
                name: part if name in BATCH_ONLY else part[query : query + 1]
                for name, part in arguments.items()
            }
        )
        parts.append(case.of(alone))
        for name in {"log_pi", "value"} & set(arguments):
            torch.testing.assert_close(
                grad(parts[-1].loss, alone[name]) / 3,
                grad(whole.loss, arguments[name])[query : query + 1],
            )
    torch.testing.assert_close(torch.stack([part.loss for part in parts]).mean(), whole.loss)
    for name, value in whole.metrics.items():
        of_parts = torch.stack([part.metrics[name] for part in parts])
        torch.testing.assert_close(of_parts.mean(), value)


@KINDS
def test_all_inputs_but_policy_and_value_get_no_gradient(kind):
    arguments = CASES[kind].arguments(batch())
    others = [
        part.requires_grad_()
        for name, part in arguments.items()
        if name not in ("log_pi", "value", "mask", "max_tokens")
    ]
    loss = CASES[kind].of(arguments).loss
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None,) * len(others)


@pytest.mark.parametrize("kind", SHIFT_INVARIANT)
def test_a_constant_added_to_the_rewards_of_a_query_changes_nothing(kind):
    inputs = batch()
    shift = torch.tensor([[7.0], [-3.0], [100.0]], dtype=torch.float64)
    shifted = inputs | {"reward": inputs["reward"] + shift}
    torch.testing.assert_close(CASES[kind](inputs).loss, CASES[kind](shifted).loss)


@pytest.mark.parametrize("kind", sorted(set(SHIFT_INVARIANT) - {"grpo", "asymre"}))
def test_one_sample_gives_no_gradient(kind):
    assert _gradients(kind, batch(samples=1))["log_pi"].abs().max() == 0


@KINDS
def test_very_stale_samples_give_finite_losses_and_gradients(kind):
    inputs = batch(dtype=torch.float32)
    stale = inputs | {"log_mu": inputs["log_mu"] - 500, "log_old": inputs["log_old"] - 700}
    assert CASES[kind](stale).loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in _gradients(kind, stale).values())


@KINDS
def test_bfloat16_is_computed_in_float32(kind):
    arguments = {
        name: part.detach().bfloat16() if name in ("log_pi", "log_mu", "log_ref", "value") else part
        for name, part in batch(dtype=torch.float32).items()
    }
    output = CASES[kind](arguments)
    assert output.loss.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in output.metrics.values())


@KINDS
def test_float32_gradient_is_accurate(kind):
    exact = _gradients(kind, batch())
    for name, gradient in _gradients(kind, batch(dtype=torch.float32)).items():
        torch.testing.assert_close(gradient.double(), exact[name], rtol=1e-4, atol=1e-5)


def test_at_ratio_one_each_is_a_policy_gradient_with_its_advantage_and_mean():
    inputs = batch()
    inputs |= {name: inputs["log_pi"].detach() for name in ("log_mu", "log_old")}
    inputs["log_ref"] = inputs["log_pi"].detach()  # k3 has no gradient there
    mask, reward = inputs["mask"], inputs["reward"]
    centred = (reward - reward.mean(1, keepdim=True)).unsqueeze(-1)
    scaled = centred / (reward.std(1, keepdim=True).unsqueeze(-1) + 1e-4)
    of_response = mask / (12 * mask.sum(-1, keepdim=True))  # token mean, then 3 x 4 responses
    of_query = mask / (3 * mask.sum((1, 2), keepdim=True))  # token mean, then 3 queries
    of_sum = mask / 12
    expected = {
        "grpo": scaled * of_response,
        "gspo": scaled * of_response,
        "tis": centred * of_response,
        "icepop": centred * of_response,
        "dr_grpo": centred * of_sum / 7,
        "cispo": centred * of_query,
        "m2po": centred * of_query,
        "decoupled_ppo": centred * of_query,
        "vineppo": inputs["step_advantage"] * of_query,
        "reinforce": (reward - reward.mean()).unsqueeze(-1) * of_sum,
        "rloo": 4 / 3 * centred * of_sum,
        "rloo_proximal": 4 / 3 * centred * of_sum,
        "topr": (reward - 10.0).unsqueeze(-1) * of_sum,
        "asymre": (centred + 0.1) * of_sum,
    }
    for kind, gradient in expected.items():
        torch.testing.assert_close(_gradients(kind, inputs)["log_pi"], -gradient, msg=kind)
