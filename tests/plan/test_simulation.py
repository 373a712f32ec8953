import math
from collections.abc import Mapping

import pytest

from plan.profiles import LENGTH, QUERIES, SAMPLES, made_config, made_profile
from tba.plan.profile import Cost, Responses
from tba.plan.simulation import Setup, Tally, simulate

BATCH = QUERIES * SAMPLES


def run(*overrides: str, searchers=1, profile=None, **setup) -> Tally:
    """Simulate a few hundred steps of round figures."""
    own = Setup(searchers, **{"warm_up": 20, "steps": 240, **setup})
    return simulate(profile or made_profile(), made_config(*overrides), own)


def mean(counts: Mapping[int, int]) -> float:
    """Return the mean of values by count."""
    return sum(value * count for value, count in counts.items()) / sum(counts.values())


@pytest.mark.parametrize(
    ("k", "searchers", "batches"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (3, 4, 1)]
)
def test_lockstep_takes_turns(k, searchers, batches):
    profile = made_profile(pull_s=0.1, publish_s=0.03, hash_s=0.05, store_wait_s=0.02)
    tally = run(
        "--sync.mode=lockstep", f"--sync.sync_every={k}", searchers=searchers, profile=profile
    )
    # deliveries that come together become durable in two turns: the first alone, then the others
    durable_s = 0.02 * min(searchers, 2)
    searching_s = 0.1 + batches * 1.0 + durable_s
    cycle_s = searching_s + k * 0.25 + 0.03 + 0.05
    assert tally.steps / tally.seconds == pytest.approx(k / cycle_s, rel=1e-3)
    assert tally.waited_s / tally.seconds == pytest.approx(searching_s / cycle_s, rel=1e-3)
    idle_share = tally.idle_s / tally.seconds / searchers
    assert idle_share == pytest.approx(1 - (searching_s - durable_s) / cycle_s, rel=1e-3)
    assert tally.trajectories / tally.steps == pytest.approx(searchers * batches * BATCH / k)
    assert tally.staleness == dict.fromkeys(range(k), tally.drawn // k)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_barrier_is_k_to_2k_minus_1_versions_stale_on_the_m_branch(k):
    tally = run("--sync.mode=barrier", f"--sync.sync_every={k}", searchers=2)
    assert set(tally.recent_staleness) == set(range(k, 2 * k))
    assert mean(tally.recent_staleness) == pytest.approx((3 * k - 1) / 2, rel=1e-3)


@pytest.mark.parametrize(("k", "batches"), [(3, 1), (4, 1), (5, 2), (8, 2)])
def test_barrier_meets_when_the_slower_side_is_ready(k, batches):
    tally = run("--sync.mode=barrier", f"--sync.sync_every={k}", steps=40 * k)
    cycle_s = max(k * 0.25, batches * 1.0)
    assert tally.steps / tally.seconds == pytest.approx(k / cycle_s, rel=1e-3)
    assert tally.waited_s / tally.seconds == pytest.approx(1 - k * 0.25 / cycle_s, abs=1e-3)
    assert tally.idle_s == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("searchers", [1, 3, 12])
def test_free_runs_both_sides_at_their_own_speed_while_there_are_places(searchers):
    tally = run(searchers=searchers)
    assert tally.steps / tally.seconds == pytest.approx(1 / 0.25)
    assert tally.trajectories / tally.seconds == pytest.approx(searchers * BATCH, rel=0.02)
    assert tally.waited_s == tally.idle_s == 0.0
    assert tally.drawn == 240 * BATCH
    assert tally.tokens_trained == 240 * BATCH * LENGTH
    assert tally.tokens_searched == LENGTH * tally.trajectories


@pytest.mark.parametrize("searchers", [1, 2, 3, 7])
def test_free_shares_two_places_among_trainer_and_searchers(searchers):
    profile = made_profile(places=2, trainer_slowdown=1.2, searcher_slowdown=1.5)
    tally = run(searchers=searchers, profile=profile)
    share = min(1.0, 2 / (1 + searchers))
    assert tally.steps / tally.seconds == pytest.approx(4 * share / 1.2, rel=1e-3)
    rate = searchers * BATCH * share / 1.5
    assert tally.trajectories / tally.seconds == pytest.approx(rate, rel=0.03)


def test_publishing_stops_a_free_trainer_for_the_copy_and_not_for_the_hash():
    tally = run("--sync.sync_every=2", profile=made_profile(publish_s=0.1, hash_s=0.2))
    assert tally.steps / tally.seconds == pytest.approx(2 / (2 * 0.25 + 0.1), rel=1e-3)


def test_a_trainer_waits_for_the_hash_of_the_weights_before():
    tally = run("--sync.sync_every=1", profile=made_profile(publish_s=0.1, hash_s=2.0))
    assert tally.steps / tally.seconds == pytest.approx(1 / (2.0 + 0.1), rel=1e-2)


def test_a_free_searcher_is_stale_by_its_own_search_and_the_wait_for_the_next():
    # weights are 4 steps old when what they found arrives, and 8 when the next batch does
    tally = run("--sync.sync_every=1", profile=made_profile(search=Cost(1.01, 0, 0)))
    assert mean(tally.staleness) == pytest.approx(4 * 1.01 * 1.5, abs=0.6)


def test_taking_in_costs_the_trainer_what_arrives():
    profile = made_profile(add_s=0.001)
    tally = run(searchers=8, profile=profile)
    # a step of T s takes in 8 * BATCH * T trajectories: T = .25 + .001 * 8 * BATCH * T
    step_s = 0.25 / (1 - 0.001 * 8 * BATCH)
    assert tally.seconds / tally.steps == pytest.approx(step_s, rel=0.02)


def test_a_trainer_that_cannot_take_in_what_arrives_ends_the_simulation():
    tally = run(searchers=64, apart=True, profile=made_profile(add_s=0.002))
    assert 0 < tally.steps < 240


def test_ranks_divide_the_tokens_and_add_an_all_reduce():
    profile = made_profile(step=Cost(0.05, 0.0, 0.2 / (BATCH * LENGTH)))
    tally = run(profile=profile, ranks=4, bytes_per_s=1e10)
    step_s = 0.05 + 0.2 / 4 + 2 * 3 / 4 * 2e9 / 1e10
    assert tally.seconds / tally.steps == pytest.approx(step_s)


def test_searchers_apart_share_nothing_but_the_network():
    profile = made_profile(places=2, trainer_slowdown=2.0, searcher_slowdown=2.0)
    tally = run(searchers=50, apart=True, profile=profile, bytes_per_s=1e9, steps=2_000)
    assert tally.steps / tally.seconds == pytest.approx(4.0)
    # 50 pulls of 1 s each go through one link, so each searcher has new weights every 50 s
    assert tally.trajectories / tally.seconds == pytest.approx(BATCH, rel=0.1)


def test_decoding_is_paid_by_the_longest_response_and_by_all_tokens():
    lengths = [[2, 4, 6, 8]] * 8
    profile = made_profile(
        search=Cost(0.1, 0.05, 0.01), responses=Responses(lengths, [[0, 1, 2, 3]] * 8)
    )
    tally = run(profile=profile)
    search_s = 0.1 + 8 * 0.05 + QUERIES * 20 * 0.01
    assert tally.trajectories / tally.seconds == pytest.approx(BATCH / search_s, rel=0.02)


def test_given_lengths_have_their_mean():
    tally = run(lengths=(200.0, 80.0), searchers=4)
    assert tally.tokens_searched / tally.trajectories == pytest.approx(200, rel=0.03)


def test_a_bound_on_reuse_makes_the_trainer_wait_for_searchers():
    tally = run("--buffer.max_reuse=1")
    # a batch a second is all there is, but for repeats where a query has too few samples left
    assert tally.waited_s / tally.seconds > 0.5
    assert tally.steps / tally.seconds < 1.5


def test_the_same_arguments_give_the_same_result():
    assert run(searchers=3) == run(searchers=3)
    assert run("--seed=1", "--buffer.on_policy_prob=0.5") != run("--buffer.on_policy_prob=0.5")


def test_a_bound_on_staleness_is_kept():
    tally = run("--buffer.on_policy_prob=0.2", "--buffer.max_staleness=9", searchers=4)
    assert max(tally.staleness) <= 9
    assert not math.isnan(mean(tally.staleness))
