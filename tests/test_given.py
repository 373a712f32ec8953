"""Training on pairs that the rows give: log, buffer, loss, resumption."""

import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tba
from tba import given
from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.errors import ConfigError, TbaError
from tba.policy.loading import load_policy
from tba.policy.reference import Reference
from tba.records import GIVEN
from tba.run.folder import RunFolder
from tba.run.rollouts import RolloutLog, decode
from tba.run.summary import Ending
from tba.sampling import draw_batch
from tba.staleness import reference_log_z
from tba.tasks import load_task
from tiny_runs import CHARACTERS, final_tensors, metrics, rollouts, tiny_config, train
from trl_pairs import trl_loss_of_pairs

TEMPERATURE = 0.7
BETA = 0.3
HELD_OUT = [{"prompt": f"{a}+9=", "chosen": "ab", "rejected": "ba"} for a in range(4)]
ROWS = [{"prompt": f"{a}+{b}=", "chosen": "ab", "rejected": "ba"} for a in "123" for b in "45"]
REPEATED = [*ROWS, {**ROWS[0], "chosen": "abc"}, {**ROWS[0], "rejected": "b"}]
"""The first prompt has three pairs."""
REWARD = "def reward(completions): return [float(c[:1] == 'a') for c in completions]"


def pairs_config(folder: Path, rows=ROWS, **sections: dict[str, object]) -> Config:
    """Return the settings of a tiny run on pairs, without a reward and without searchers."""
    for name, content in (("train", rows), ("test", HELD_OUT)):
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "judge.py").write_text(REWARD)
    task = {
        "kind": "custom",
        "train_file": folder / "train.jsonl",
        "test_file": folder / "test.jsonl",
        "max_prompt_length": 8,
        **sections.pop("task", {}),
    }
    settings: dict[str, dict[str, object]] = {
        "buffer": {"given": "pairs"},
        "search": {"searchers": 0, "temperature": TEMPERATURE},
        "objective": {"kind": "dpo", "beta": {"kind": "constant", "value": BETA}},
        "trainer": {"samples_per_query": 2, "queries_per_batch": 2},
        "sync": {"sync_every": 1},
    }
    for name, section in sections.items():
        merged = {**settings.get(name, {}), **section}
        settings[name] = section if name == "objective" else merged
    config = tiny_config(folder, **settings)
    return Config.model_validate({**config.model_dump(), "task": task})


def searching(folder: Path) -> dict[str, dict[str, object]]:
    """Return what makes searchers join in."""
    reward = (f"{folder / 'judge.py'}:reward",)
    return {"search": {"searchers": 1}, "task": {"reward": reward}}


def log_probs(folder: Path, prompt: str, answer: str) -> torch.Tensor:
    """Return log p of each token of an answer and its end, by the plainest forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer(prompt)["input_ids"]
    answered = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        logits = model(torch.tensor([asked + answered])).logits[0] / TEMPERATURE
    predicted = logits.log_softmax(-1)[len(asked) - 1 : -1]
    return predicted.gather(1, torch.tensor(answered).unsqueeze(1)).squeeze(1)


def policy_of(run: Path, step: int) -> Path:
    return run / f"checkpoints/step-{step:08d}/policy"


def margin(run: Path, step: int, row: dict[str, str]) -> float:
    """Return h of a pair: log pi / ref of the chosen answer less that of the rejected one."""
    chosen, rejected = (
        (log_probs(policy_of(run, step), row["prompt"], row[name]).sum())
        - log_probs(run / "model", row["prompt"], row[name]).sum()
        for name in ("chosen", "rejected")
    )
    return float(chosen - rejected)


def logged_pairs(run: Path) -> Counter[tuple[object, object]]:
    """Return how often the log holds each given answer, by query and text."""
    return Counter((r["query_id"], r["text"]) for r in rollouts(run) if r["searcher"] == GIVEN)


def every_pair(rows) -> Counter[tuple[object, object]]:
    """Return each answer of each row once."""
    return Counter((i, row[name]) for i, row in enumerate(rows) for name in ("chosen", "rejected"))


# --- the loss ---------------------------------------------------------------------------------

PUBLISHED = {
    "dpo": lambda h: math.log1p(math.exp(-BETA * h)),  # 2305.18290 (7)
    "ipo": lambda h: (h - 1 / (2 * BETA)) ** 2,  # 2310.12036 (17)
}


@pytest.fixture(scope="module", params=PUBLISHED)
def trained(request, tmp_path_factory):
    """Train three steps on one pair; return the objective's kind, the run and the pair."""
    folder = tmp_path_factory.mktemp("pairs")
    row = {"prompt": "1+2=", "chosen": "3", "rejected": "abc"}
    beta = {"kind": "constant", "value": BETA}
    config = pairs_config(
        folder,
        [row],
        objective={"kind": request.param, "beta": beta},
        trainer={"steps": 3, "samples_per_query": 2, "queries_per_batch": 1},
        checkpoint={"every": 1, "keep": 9},
    )
    train(folder, config)
    return request.param, folder / "run", row


def test_the_loss_on_a_given_pair_is_the_published_formula(trained):
    kind, run, row = trained
    lines = metrics(run)
    assert abs(margin(run, 2, row)) > 0.05
    assert lines[0]["loss"] == pytest.approx(PUBLISHED[kind](0.0), rel=1e-5)
    for step in (1, 2):
        expected = PUBLISHED[kind](margin(run, step, row))
        assert lines[step]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("default")  # importing trl warns
@pytest.mark.parametrize("trained", ["dpo"], indirect=True)
def test_the_loss_on_a_given_pair_is_trl_s(trained):
    _, run, row = trained  # not ipo: TRL divides by lengths
    policy, reference = (
        torch.nn.utils.rnn.pad_sequence(
            [log_probs(folder, row["prompt"], row[name]) for name in ("chosen", "rejected")],
            batch_first=True,
        ).unsqueeze(0)
        for folder in (policy_of(run, 2), run / "model")
    )  # [1, 2, token]
    mask = reference != 0
    loss = trl_loss_of_pairs("sigmoid", policy, reference, mask, BETA)
    assert metrics(run)[2]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_what_is_logged_of_a_pair(trained):
    _, run, row = trained
    better, worse = rollouts(run)
    assert (better["text"], worse["text"]) == (row["chosen"], row["rejected"])
    assert (better["reward"], worse["reward"]) == (1.0, 0.0)
    for answer in (better, worse):
        expected = log_probs(run / "model", row["prompt"], answer["text"])
        torch.testing.assert_close(
            torch.tensor(answer["log_ref"]).double(), expected, rtol=0, atol=1e-5
        )
        assert answer["log_mu"] == answer["log_ref"]
        assert (answer["ticket"], answer["searcher"], answer["policy_version"]) == (-1, -1, 0)
        assert answer["temperature"] == TEMPERATURE
        assert answer["finish_reason"] == "stop"


def test_training_on_pairs_raises_the_margin_of_pairs_it_has_not_seen(tmp_path):
    config = pairs_config(tmp_path, trainer={"steps": 25, "queries_per_batch": 6})
    train(tmp_path, config)
    run = tmp_path / "run"
    for row in (*ROWS[:2], *HELD_OUT[:2]):
        assert margin(run, 25, row) > 1.0
    lines = metrics(run)
    assert lines[-1]["pair_accuracy"] == 1.0
    assert lines[-1]["loss"] < lines[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)


# --- how pairs are drawn ----------------------------------------------------------------------


@pytest.fixture
def buffer(tmp_path):
    """A buffer that holds the pairs of `REPEATED`."""
    config = pairs_config(tmp_path, REPEATED)
    tba.policy.build.build_policy(config.model.build, tmp_path / "model", seed=0)
    policy = load_policy(
        tmp_path / "model", config.model, device=torch.device("cpu"), dtype=torch.float32
    )
    task = load_task(config.task, policy.tokenizer, given="pairs")
    found = given.read_given("pairs", task, policy, longest=4)
    filled = ReplayBuffer(100)
    reference = Reference(policy.model, temperature=1.0)
    for batch in given.batches(found.missing({}), reference, None, TEMPERATURE, is_first=True):
        filled.add(batch)
    return filled, config.buffer


def draws(buffer, config, samples_per_query, count=20):
    for seed in range(count):
        yield draw_batch(
            buffer,
            queries_per_batch=len(REPEATED),
            samples_per_query=samples_per_query,
            trainer_version=seed,
            config=config,
            generator=np.random.default_rng(seed),
        )


def test_two_samples_of_a_query_are_the_two_of_its_pair(buffer):
    for batch in draws(*buffer, 2):
        assert np.sort(batch.reward[batch.index], axis=1).tolist() == [[0, 1]] * len(REPEATED)
        assert len(batch.tokens) == 2 * len(REPEATED), "rows that repeat a prompt stay apart"


def test_more_samples_are_the_same_two_again(buffer):
    for batch in draws(*buffer, 5):
        rewards = batch.reward[batch.index]
        assert rewards.shape == (len(REPEATED), 5)
        assert set(rewards.ravel()) == {0, 1}
        assert np.bincount(batch.query_of_row).max() <= 2


@pytest.mark.parametrize("samples", [3, 5])
def test_the_loss_of_more_samples_is_that_of_the_pair(samples):
    from tba.objectives.preference import dpo

    pair = [torch.randn(1, 2, 4), torch.randn(1, 2, 4), torch.ones(1, 2, 4).bool()]
    reward = torch.tensor([[1.0, 0.0]])
    again = [0, 1, *[0, 1, 1][: samples - 2]]
    repeated = [part[:, again] for part in (*pair, reward)]
    torch.testing.assert_close(
        dpo(*repeated, beta=BETA).loss, dpo(*pair, reward, beta=BETA).loss, rtol=1e-6, atol=1e-6
    )


# --- whole runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_an_offline_run_generates_nothing_and_says_that_it_was_not_evaluated(tmp_path, kind):
    summary = train(tmp_path, pairs_config(tmp_path, REPEATED, runtime={"kind": kind}))
    run = tmp_path / "run"
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 6)
    assert summary.detail == "pass@1 is not measured, since the task has no reward function"
    assert (summary.before, summary.after, summary.tokens_searched) == (None, None, 0)
    assert summary.trajectories.kept == 2 * len(REPEATED)
    assert (summary.staleness.min, summary.staleness.max) == (0, 5)
    assert logged_pairs(run) == every_pair(REPEATED)
    assert [path.name for path in (run / "logs").iterdir()] == ["trainer.log"]
    for line in metrics(run):
        shares = ("trainer_idle_share", "searcher_idle_share", "search_tokens_per_s")
        assert [line[name] for name in shares] == [0, 0, 0]
        assert (line["searchers_alive"], line["unique_share"], line["reward_mean"]) == (0, 1, 0.5)
        assert line["pass_at_1"] is None
        assert line["equal_reward_share"] == 0


def test_an_offline_run_with_a_reward_is_evaluated(tmp_path):
    judge = (f"{tmp_path / 'judge.py'}:reward",)
    summary = train(tmp_path, pairs_config(tmp_path, task={"reward": judge}))
    assert (summary.ended, summary.detail, summary.tokens_searched) == (Ending.FINISHED, "", 0)
    for report in (summary.before, summary.after):
        assert (report.queries, report.excluded) == (len(HELD_OUT), 0)


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_searchers_add_to_the_pairs(tmp_path, kind):
    config = pairs_config(tmp_path, runtime={"kind": kind}, **searching(tmp_path))
    summary = train(tmp_path, config)
    rows = rollouts(tmp_path / "run")
    assert summary.ended is Ending.FINISHED
    assert logged_pairs(tmp_path / "run") == every_pair(ROWS)
    assert {row["searcher"] for row in rows[: 2 * len(ROWS)]} == {GIVEN}, "they come first"
    searched = [row for row in rows if row["searcher"] != GIVEN]
    assert min(row["ticket"] for row in searched) == 0
    assert len(searched) >= 16
    assert summary.tokens_searched > 0


def test_given_answers_do_not_count_as_the_reference_s_responses(tmp_path):
    train(tmp_path, pairs_config(tmp_path))
    with RolloutLog(tmp_path / "run/rollouts.arrows") as log:
        assert reference_log_z(log.read(), 0.1) == {}


def test_a_run_on_pairs_can_be_analysed(tmp_path):
    from tba.analyse import Plan, analyse

    train(tmp_path, pairs_config(tmp_path))
    (found,) = analyse(tmp_path / "run", Plan(objectives=("dpo", "ipo"))).bins
    assert (found.bin, found.samples, found.reference_queries) == ("4-7", 2 * len(ROWS), 0)
    assert found.loss["dpo"] < math.log(2)


# --- resuming ---------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing catches it, nothing is put in order."""


def die_at(patch, calls_left: int) -> None:
    """Let a write to the rollout log be torn and the last thing that the run does."""
    pwrite, left = os.pwrite, [calls_left]

    def torn(descriptor, data, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rollouts.arrows"):
            left[0] -= 1
            if left[0] < 0:
                pwrite(descriptor, bytes(data)[: len(data) // 2], offset)
                raise Killed
        return pwrite(descriptor, data, offset)

    patch.setattr(os, "pwrite", torn)
    patch.setattr(RunFolder, "_restore", lambda folder: None)


@pytest.mark.parametrize("kind", ["inline", "local"])
@pytest.mark.parametrize("writes", [0, 1, 2, 4])
def test_a_run_killed_while_it_wrote_its_pairs_has_each_once(tmp_path, monkeypatch, kind, writes):
    monkeypatch.setattr(given, "ANSWERS_PER_BATCH", 4)  # the header and four batches
    whole = tmp_path / "whole"
    whole.mkdir()
    config = pairs_config(tmp_path, REPEATED, runtime={"kind": kind})
    train(whole, config)
    with monkeypatch.context() as patch:
        die_at(patch, writes)
        with pytest.raises(Killed):
            train(tmp_path, config)
    run = tmp_path / "run"
    summary = tba.resume(run, progress=False)
    assert (summary.ended, summary.steps) == (Ending.FINISHED, 6)
    assert logged_pairs(run) == every_pair(REPEATED)
    assert [repr(row) for row in rollouts(run)] == [repr(row) for row in rollouts(whole / "run")]
    for name, tensor in final_tensors(run).items():
        assert torch.equal(tensor, final_tensors(whole / "run")[name]), name


@pytest.mark.parametrize("searchers", [0, 1])
def test_a_run_resumed_from_a_checkpoint_has_each_pair_once(tmp_path, monkeypatch, searchers):
    from tba.update import PolicyUpdate

    more = searching(tmp_path) if searchers else {}
    config = pairs_config(tmp_path, REPEATED, checkpoint={"every": 2}, **more)
    whole = tmp_path / "whole"
    whole.mkdir()
    train(whole, config)
    step = PolicyUpdate.step

    def killed(update, batch, number):
        if number == 3:
            raise Killed
        return step(update, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdate, "step", killed)
        with pytest.raises(Killed):
            train(tmp_path, config)
    for _ in range(2 - searchers):  # a finished run may be resumed too
        summary = tba.resume(tmp_path / "run", progress=False)
        assert (summary.ended, summary.steps) == (Ending.FINISHED, 6)
        assert logged_pairs(tmp_path / "run") == every_pair(REPEATED)
        assert summary.trajectories.kept >= 2 * len(REPEATED)
    for name, tensor in final_tensors(tmp_path / "run").items():
        assert torch.equal(tensor, final_tensors(whole / "run")[name]), name
    tickets = [[row["ticket"] for row in rollouts(path / "run")] for path in (tmp_path, whole)]
    assert tickets[0] == tickets[1]


# --- what is left out and refused -------------------------------------------------------------


def test_pairs_too_long_or_equal_are_left_out_and_told(tmp_path, capsys):
    rows = [
        *ROWS,
        {"prompt": "1+1=", "chosen": "abc", "rejected": "abcd"},  # five tokens with the end
        {"prompt": "1+1=", "chosen": "ab", "rejected": "ab"},
        {"prompt": "1+1=", "chosen": "abcde", "rejected": "abcde"},
    ]
    config = pairs_config(tmp_path, rows)
    tba.train(config, run_dir=tmp_path / "run")
    assert logged_pairs(tmp_path / "run") == every_pair(ROWS)
    told = capsys.readouterr().err
    assert (
        "skipped given pairs: 2 with an answer longer than search.max_completion_length, "
        "1 with two equal answers" in told
    )
    assert "the buffer starts with 6 given pairs" in told


def test_an_answer_that_ends_itself_is_not_ended_twice(tmp_path):
    rows = [*ROWS, {"prompt": "1+1=", "chosen": "ab<eos>", "rejected": "ab"}]
    config = pairs_config(tmp_path, rows)
    train(tmp_path, config)
    assert logged_pairs(tmp_path / "run") == every_pair(ROWS), "the last pair is one of equals"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("tb_prime", "log_mu"), ("grpo", "log_mu"), ("ppo", "log_mu"), ("vineppo", "log_mu"),
     ("a_star_po", "log_z_star"), ("subtb", "log_ref_stop"), ("custom", "log_mu")],
)  # fmt: skip
def test_an_objective_that_asks_for_what_nobody_knows_is_refused(tmp_path, kind, name):
    section = {"kind": kind}
    if kind == "custom":
        (tmp_path / "mine.py").write_text("def mine(log_pi, log_mu, mask): pass")
        section["function"] = f"{tmp_path / 'mine.py'}:mine"
    config = pairs_config(tmp_path, objective=section)
    with pytest.raises(ConfigError, match=rf"objective\.kind = {kind} asks for {name}, which is"):
        train(tmp_path, config)
    assert not (tmp_path / "run/config.json").exists()


def test_a_bound_on_reuse_that_leaves_nothing_to_draw_ends_the_run_at_once(tmp_path):
    config = pairs_config(tmp_path, buffer={"given": "pairs", "max_reuse": 1})
    with pytest.raises(TbaError, match=r"max_reuse = 1 times after 3 steps: raise it"):
        train(tmp_path, config)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["ended"], summary["steps"]) == ("failed", 3)
    assert logged_pairs(tmp_path / "run") == every_pair(ROWS)


def test_a_decoded_pair_is_the_trajectory_that_was_encoded(tmp_path):
    train(tmp_path, pairs_config(tmp_path))
    with RolloutLog(tmp_path / "run/rollouts.arrows") as log:
        (batch,) = log.read()
    assert {trajectory.ticket for trajectory in decode(batch)} == {GIVEN}
    assert set(CHARACTERS) >= set("".join(t.text for t in decode(batch)))
