"""What every runtime promises (`tba.runtimes.base`)."""

import threading
import time

import pytest
import torch

from tba.config import Config
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.run.folder import RunFolder
from tba.run.rollouts import RolloutLog
from tba.runtimes import SearchPlan, make_runtime
from tba.searcher import Stores
from tba.sync import WeightStore
from tiny_runs import tiny_config

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 300.0


def receive_until(runtime, condition):
    """Receive until a condition holds; return what came, in order."""
    found, deadline = [], time.monotonic() + PATIENCE_S
    while not condition(found):
        assert time.monotonic() < deadline, runtime.waiting_for(0)
        found += runtime.receive(0.2)
    return found


def column(batches, name):
    return [value for batch in batches for value in batch.column(name).to_pylist()]


@pytest.fixture(params=["inline", "local"])
def make(request, tmp_path):
    """Make a runtime of two searchers with weights of version 0 published."""
    logs = []

    def prepare(mode: str):
        config: Config = tiny_config(
            tmp_path,
            runtime={"kind": request.param},
            search={"searchers": 2},
            sync={"mode": mode, "sync_every": 4},
        )
        model = tmp_path / "model"
        build_policy(config.model.build, model, seed=0)
        policy = load_policy(
            model, config.model, device=torch.device("cpu"), dtype=torch.float32
        ).model
        weights = dict(policy.named_parameters())
        store = WeightStore(weights, torch.float32)
        store.publish(weights, 0)
        store.flush()
        folder = RunFolder(tmp_path)
        (tmp_path / "logs").mkdir()
        logs.append(RolloutLog(folder.rollouts))
        plan = SearchPlan(config, str(model), Stores(store, None), next_ticket=3)
        return make_runtime(plan, logs[0], folder), logs[0]

    yield prepare
    logs[0].close()


def test_a_free_runtime_delivers_in_the_order_of_the_log_and_leaves_nothing_behind(make):
    runtime, log = make("free")
    threads = threading.active_count()
    with runtime:
        found = receive_until(runtime, lambda found: len(set(column(found, "searcher"))) == 2)
        assert runtime.status().alive == 2
        assert len(runtime.waiting_for(0)) == 2, "no round was ever delivered"
    found += runtime.receive(0.0)
    logged = list(log.read())
    assert [repr(b.to_pydict()) for b in found] == [repr(b.to_pydict()) for b in logged]
    tickets = {b.column("ticket")[0].as_py(): set(column([b], "searcher")) for b in found}
    assert len(tickets) == len(found), "a search batch is one delivery"
    assert min(tickets) >= 3
    assert all(lanes == {ticket % 2} for ticket, lanes in tickets.items())
    assert set(column(found, "policy_version")) == {0}
    status = runtime.status()
    assert (status.alive, status.restarts) == (0, 0)
    assert status.tokens == sum(map(len, column(found, "tokens")))
    assert status.busy_s > 0
    assert runtime.receive(0.0) == []
    assert threading.active_count() == threads


def test_a_lockstep_round_brings_each_searchers_share_and_then_rests(make):
    runtime, log = make("lockstep")
    with runtime:
        assert runtime.receive(0.0) == []
        for number in range(2):
            runtime.open_round(number)
            found = receive_until(runtime, lambda _: not runtime.waiting_for(number))  # noqa: B023
            found += runtime.receive(0.0)
            share = 2  # k B / (2 searchers of 4 queries) = 4 * 4 / 8
            assert len(found) == 2 * share
            assert sorted({b.column("ticket")[0].as_py() for b in found}) == list(
                range(3 + 4 * number, 7 + 4 * number)
            )
            assert runtime.receive(0.3) == []
            assert all("searcher" in name for name in runtime.waiting_for(number + 1))
    assert len(list(log.read())) == 8
