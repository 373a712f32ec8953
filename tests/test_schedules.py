import pytest

from tba.config.objectives import ConstantBeta, LinearBeta, LinearThenCutBeta
from tba.config.training import ConstantRate, CosineRate, LinearRate, WarmupStableDecayRate
from tba.schedules import beta_at, learning_rate_at


def _betas(config, steps, at):
    return [beta_at(config, step, steps) for step in at]


def _rates(config, steps, at):
    return [learning_rate_at(config, step, steps) for step in at]


def test_constant_beta_stays():
    assert _betas(ConstantBeta(value=0.005), 400, [0, 399]) == [0.005, 0.005]


def test_linear_beta_of_gsm8k_falls_from_012_to_004_at_half_the_run():
    config = LinearBeta(start=0.012, end=0.004, end_at=0.5)
    # .008 over 500 steps: a quarter way at 125, half way at 250.
    found = _betas(config, 1000, [0, 125, 250, 499, 500, 999])
    assert found == pytest.approx([0.012, 0.010, 0.008, 0.004016, 0.004, 0.004])


def test_linear_then_cut_beta_of_tldr_is_cut_at_an_eighth_of_the_run():
    config = LinearThenCutBeta(start=1.0, end=0.05, end_at=0.5, cut_at=0.125)
    # 256 steps: the line loses .95 over 128 steps, so at 16 it is 1 - .95 / 8; the cut comes at 32.
    found = _betas(config, 256, [0, 16, 31, 32, 128, 255])
    assert found == pytest.approx([1.0, 0.88125, 1 - 0.95 * 31 / 128, 0.05, 0.05, 0.05])


def test_warm_up_takes_its_first_step_at_one_share_and_its_last_at_the_peak():
    assert _rates(ConstantRate(warmup_steps=4), 10, range(6)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_rate_would_be_zero_one_step_after_the_last():
    # 2 steps of warm-up leave 8: the n-th step after it has (8 - n) / 8.
    found = _rates(LinearRate(warmup_steps=2), 10, [0, 1, 2, 3, 6, 9])
    assert found == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 4 / 8, 1 / 8])


def test_cosine_rate_is_half_way_down_at_half_time():
    found = _rates(CosineRate(), 8, [0, 2, 4, 6])
    # (1 + cos(pi n / 8)) / 2 at n = 0, 2, 4, 6, with cos(pi / 4) = .70711.
    assert found == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_cosine_rate_ends_at_its_final_share():
    config = CosineRate(final_share=0.1)
    assert learning_rate_at(config, 500, 1000) == pytest.approx(0.55)
    assert learning_rate_at(config, 999, 1000) == pytest.approx(0.1, abs=1e-5)


def test_warmup_stable_decay_of_gsm8k_is_50_450_500():
    config = WarmupStableDecayRate(warmup_steps=50, decay_steps=500)
    found = _rates(config, 1000, [0, 24, 49, 50, 499, 500, 501, 750, 999])
    assert found == pytest.approx([0.02, 0.5, 1, 1, 1, 1, 499 / 500, 0.5, 1 / 500])


@pytest.mark.parametrize(
    "config",
    [ConstantRate(), LinearRate(), CosineRate(), WarmupStableDecayRate()],
    ids=lambda config: config.kind,
)
@pytest.mark.parametrize("steps", [1, 2, 30, 60])
def test_no_step_of_any_run_is_without_a_learning_rate(config, steps):
    assert all(0 < rate <= 1 for rate in _rates(config, steps, range(steps)))


def test_a_decay_longer_than_what_warmup_leaves_is_cut_and_the_peak_is_reached():
    config = WarmupStableDecayRate(warmup_steps=2, decay_steps=100)
    assert _rates(config, 6, range(6)) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
