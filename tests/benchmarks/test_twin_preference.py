"""The preference twin: its judge, its pairs, its settings, what is made of results."""

import dataclasses
import json

import pytest
from benchmarks.entrants import Budget
from benchmarks.twin_preference import (
    COMMON,
    curves,
    entrants,
    finished,
    parts,
    picture,
    sync_every,
    table,
)

from benchmarks import preference_data
from tba.config.load import load_config
from tba.errors import DataError
from tba.eval import PolicyReport

MODELS = ("--task.train_file=a", "--task.reward_model=rm", "--model.model_name_or_path=m")


def report(kl: float, win_rate: float) -> dict:
    measured = {
        "win_rate_reference": win_rate,
        "gold_reward": 0.1,
        "reward": 1.0,
        "distinct_1": 0.5,
        "distinct_2": 0.75,
    }
    whole = PolicyReport(
        policy="p",
        reference="r",
        queries=2,
        samples=4,
        greedy_pass_at_1=None,
        pass_at={},
        measured=measured,
        mean_response_tokens=20.0,
        perplexity=3.0,
        paper_perplexity=2.0,
        kl=kl,
        excluded=0,
    )
    return json.loads(json.dumps(dataclasses.asdict(whole)))


def result(method: str, seed: int, kl: float, win_rate: float, steps: int = 20) -> dict:
    last = report(kl, win_rate)
    found = {"method": method, "seed": seed, "steps": steps, "staleness": 2.5}
    return found | {"report": last, "reports": [[steps // 2, report(kl / 2, 0.5)], [steps, last]]}


def test_every_method_can_run_at_every_rate_and_staleness():
    found = entrants(["ppo", "tba", "rloo", "online-dpo"], ["1e-5"], [1, 15])
    assert [parts(entrant.name) for entrant in found] == [
        (method, "1e-5", staleness)
        for staleness in (1, 15)
        for method in ("tba", "online-dpo", "rloo", "ppo")
    ]
    configs = [load_config([], [*COMMON, *MODELS, *e.overrides]) for e in found]
    assert [config.sync.sync_every for config in configs] == [1] * 4 + [10] * 4
    assert {config.sync.mode for config in configs} == {"barrier"}
    assert {config.trainer.learning_rate for config in configs} == {1e-5}
    kinds = ["tb", "online_dpo", "rloo_proximal", "ppo"]
    assert [config.objective.kind for config in configs] == 2 * kinds
    assert [config.buffer.on_policy_prob for config in configs] == 2 * [0.5, 1.0, 1.0, 1.0]
    some = entrants(["rloo"], ["1e-5", "0.00003"], [2])
    assert [entrant.name for entrant in some] == ["rloo-at-1e-5-2", "rloo-at-0.00003-2"]


def test_barriers_are_where_their_mean_staleness_is_next_to_the_wanted():
    # (3 k - 1) / 2: 1, 2.5, 4, ..., 14.5
    assert [sync_every(staleness) for staleness in (1, 2, 4, 15)] == [1, 2, 3, 10]


def test_a_budget_of_steps_keeps_checkpoints_at_even_distances():
    overrides = [*COMMON, *MODELS, *Budget(steps=40, checkpoints=2).overrides()]
    config = load_config([], overrides)
    assert (config.trainer.steps, config.checkpoint.every, config.checkpoint.keep) == (40, 20, 2)
    assert load_config([], [*COMMON, *MODELS, *Budget(7.0).overrides()]).checkpoint.every == 0


def test_repetition_is_the_share_of_words_seen_before():
    from benchmarks.gold_judge import repeated

    assert repeated("") == 0
    assert repeated("A good day, a GOOD night!") == pytest.approx(2 / 6)
    assert repeated("great great great great") == 0.75


def test_the_judge_likes_gladness_and_no_repetition():
    pytest.importorskip("vaderSentiment")
    from benchmarks.gold_judge import judge

    glad, neutral, sad, empty, hacked = judge(
        ["What a wonderful day", "The sky is up there", "What a horrible day", "", "great " * 20]
    )
    assert glad > neutral == empty == 0 > sad
    assert hacked < glad
    assert hacked < 0.1  # .95 glad repetition is hardly better than saying nothing


def test_pairs_use_each_completion_once_and_are_ordered(monkeypatch):
    monkeypatch.setattr(preference_data, "judge", lambda texts: [len(text) for text in texts])
    assert preference_data.ordered(["a", "aaaa", "aa", "aaa"]) == [
        {"prompt": " ", "chosen": "aaaa", "rejected": "aa"},
        {"prompt": " ", "chosen": "aaa", "rejected": "a"},
    ]
    assert preference_data.ordered(["b", "a"]) == []  # as good as each other


def test_short_open_ended_instructions_are_split_once(tmp_path):
    tasks = [
        {"instruction": f" Say {i}.", "instances": [{"input": "x\n" if i % 2 else ""}]}
        for i in range(130)
    ]
    tasks.append({**tasks[0], "is_classification": True})
    tasks.append({**tasks[0], "instruction": "long " * 61})
    source = tmp_path / "seed.jsonl"
    source.write_text("\n".join(map(json.dumps, tasks)))
    assert preference_data.prompts_of(source)[:2] == [{"prompt": "Say 0."}, {"prompt": "Say 1.\nx"}]
    files = preference_data.Files(tmp_path / "out")
    files.out.mkdir()
    preference_data.write_prompts(tmp_path, files)
    held_out, train = (set(f.read_text().splitlines()) for f in (files.test, files.train))
    assert (len(held_out), len(train), len(held_out | train)) == (64, 66, 130)


def test_a_folder_without_enough_instructions_is_named(tmp_path):
    with pytest.raises(DataError, match="has 0 instructions of at most 300 characters"):
        preference_data.write_prompts(tmp_path, preference_data.Files(tmp_path / "out"))


def test_results_are_read_back_in_order_and_tabled(tmp_path):
    kept = [
        *(result("online-dpo-at-3e-5-1", 0, 1.0, 0.6), result("tba-at-3e-5-15", 0, 4.0, 0.9)),
        *(result("tba-at-3e-5-1", 1, 3.0, 0.8), result("tba-at-3e-5-1", 0, 1.0, 0.6)),
        result("tba-at-1e-4-1", 0, 9.0, 0.9),
    ]
    for each in kept:
        (tmp_path / f"{each['method']}-{each['seed']}.json").write_text(json.dumps(each))
    (tmp_path / "start.json").write_text("{}")
    found = finished(tmp_path)
    order = [("tba", 1, 0), ("tba", 1, 1), ("tba", 1, 0), ("online-dpo", 1, 0), ("tba", 15, 0)]
    placed = [(parts(each["method"]), each["seed"]) for each in found]
    assert [(method, staleness, seed) for (method, _, staleness), seed in placed] == order
    assert [rate for (_, rate, _), _ in placed] == ["3e-5", "3e-5", "1e-4", "3e-5", "3e-5"]
    page = table(report(0.0, 0.5), found)
    # win rate: mean .7, error |.8 - .6| / 2 = .1; KL: mean 2, error |3 - 1| / 2 = 1
    assert "| 1 | tba | 3e-5 | 2 | 2.500 +- 0.000 | 0.700 +- 0.100 |" in page
    assert "| 2.000 +- 1.000 |" in page
    assert page.count("\n") == 6 - 1 + 1


def test_curves_begin_with_the_reference_and_are_means_over_seeds(tmp_path):
    pytest.importorskip("matplotlib")
    found = [
        *(result("tba-at-3e-5-1", 0, 1.0, 0.6), result("tba-at-3e-5-1", 1, 3.0, 0.8)),
        result("ppo-at-3e-5-15", 0, 1.0, 0.7),
    ]
    drawn = curves(report(0.0, 0.5), found)
    assert [curve.label for curve in drawn] == ["tba-at-3e-5-1", "ppo-at-3e-5-15"]
    points = [
        (p.step, p.report.kl, p.report.measured["win_rate_reference"]) for p in drawn[0].points
    ]
    assert points == [(0, 0.0, 0.5), (10, 1.0, 0.5), (20, 2.0, pytest.approx(0.7))]
    picture(report(0.0, 0.5), found, tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"pareto.json", "pareto-1.png", "pareto-15.png"}
