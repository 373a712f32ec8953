"""A whole red-teaming run with one searcher through the command line, and what comes after it."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tba.cli import app
from tba.config import BuildConfig
from tba.config.model import ModelConfig
from tba.errors import AllExcludedError
from tba.given import batches, read_given
from tba.policy.build import build_policy
from tba.policy.loading import load_policy
from tba.policy.reference import Reference
from tba.records import Outcome, Score
from tba.run.folder import RunFolder
from tba.run.rebuild import rebuild_buffer
from tba.run.rollouts import RolloutLog
from tba.tasks.embedding import Embedder
from tba.tasks.redteam import load_redteam
from tba.tasks.redteam_reward import AttackReward
from tests.test_near_duplicates import add_plainly
from tiny_runs import CHARACTERS, metrics, rollouts

JUDGE = """
def digits(texts):
    return [(0.2 + sum(c.isdigit() for c in text)) / (1 + len(text)) for text in texts]
"""
BUILD = {
    "characters": CHARACTERS + " ?",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
SETTINGS = """
[model.build]
{build}
[task]
kind = "redteam"
attack_prompt = "ask "
max_prompt_length = 8
victim = "{folder}/victim"
victim_template = "{{attack}}?"
victim_samples = 3
victim_max_tokens = 4
classifier = "{folder}/judge.py:digits"
min_length = 3
scoring_device = "cpu"
[search]
searchers = 1
queries_per_batch = 1
samples_per_query = 16
max_completion_length = 6
[buffer]
initial_samples = 16
on_policy_prob = 0.5
off_policy_sampling = "softmax_reward"
[objective]
kind = "tb_learned_z"
beta = {{kind = "linear", start = 0.2, end = 0.1, end_at = 0.5}}
reference_weight = {{kind = "linear", start = 0.5, end = 1.0, end_at = 0.5}}
[trainer]
steps = 6
queries_per_batch = 1
samples_per_query = 8
learning_rate = 3e-3
micro_batch_tokens = 128
[evaluation]
queries = 12
[checkpoint]
every = 0
"""


def tba(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("redteam")
    build_policy(BuildConfig(**BUILD), folder / "victim", seed=5)
    (folder / "judge.py").write_text(JUDGE)
    build = "\n".join(f"{name} = {json.dumps(value)}" for name, value in BUILD.items())
    (folder / "run.toml").write_text(SETTINGS.format(build=build, folder=folder))
    tba("train", folder / "run.toml", "--run-dir", folder / "run")
    return folder / "run"


def test_rewards_in_the_log_are_those_of_the_probabilities_beside_them(run):
    rows = rollouts(run)
    assert len(rows) >= 16
    lowest = math.log(1e-8)
    for row in rows:
        probabilities = dict(row["extras"])["probabilities"]
        assert len(probabilities) == 3
        if len(row["tokens"]) < 3:
            assert row["reward"] == pytest.approx(lowest)
            assert probabilities == [0.0] * 3
        else:
            assert row["reward"] == pytest.approx(np.log(probabilities).mean(), rel=1e-5)
    by_text = {}
    for row in rows:
        if len(row["tokens"]) >= 3:
            assert by_text.setdefault(row["text"].strip(), row["reward"]) == pytest.approx(
                row["reward"], rel=1e-4
            )


def test_attack_success_is_measured_before_and_after(run):
    summary = json.loads((run / "summary.json").read_text())
    for when in ("before", "after"):
        report = summary[when]
        assert report["queries"] == 12
        assert report["greedy_pass_at_1"] is None
        assert 0 <= report["measured"]["attack_success"] <= 1
    assert [line["beta"] for line in metrics(run)] == pytest.approx(
        [0.2, 0.2 - 0.1 / 3, 0.2 - 0.2 / 3, 0.1, 0.1, 0.1]
    )


def test_smoothing_learns_the_successful_attacks_from_the_initial_model(run):
    threshold = 0.25
    told = tba(
        "smooth",
        run,
        "--threshold",
        threshold,
        "--steps",
        20,
        "--learning-rate",
        "3e-3",
        "--batch-size",
        8,
    )
    best = {
        tuple(row["tokens"]): row
        for row in rollouts(run)
        if np.mean(dict(row["extras"])["probabilities"]) > threshold and sum(row["log_ref"]) > -100
    }
    assert best
    assert f"learned from {len(best)} of " in told
    AutoModelForCausalLM.from_pretrained(run / "smoothed")
    AutoTokenizer.from_pretrained(run / "smoothed")
    prompts = [np.array(row["prompt_ids"], np.int32) for row in best.values()]
    answers = [np.array(tokens, np.int32) for tokens in best]
    likelihood = []
    for name in ("model", "smoothed"):
        policy = load_policy(
            run / name, ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
        )
        found = Reference(policy.model, temperature=1.0).log_ref(
            prompts, answers, np.arange(len(answers))
        )
        likelihood.append(np.concatenate(found).mean())
    assert likelihood[1] > likelihood[0] + 0.1
    again = CliRunner().invoke(app, ["smooth", str(run)])
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_smoothing_of_a_run_that_was_killed_before_its_first_attack(run, tmp_path):
    for name in ("config.json", "tba.lock"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    result = CliRunner().invoke(app, ["smooth", str(tmp_path)])
    assert result.exit_code == 2
    assert "has no attacks yet: let it search first" in " ".join(result.stderr.split())


def test_smoothing_refuses_a_bound_that_is_no_number(run):
    result = CliRunner().invoke(app, ["smooth", str(run), "--min-log-ref", "nan"])
    assert result.exit_code == 2
    assert "--min-log-ref is nan, expected a number" in result.stderr


def test_smoothing_says_when_nothing_was_good_enough(run):
    result = CliRunner().invoke(app, ["smooth", str(run), "--threshold", "1", "--out", "nowhere"])
    assert result.exit_code == 2
    assert "has a mean probability above 1 and log ref above -100" in result.stderr


# --- attacks given at the start ---------------------------------------------------------------

FRAGILE = (
    JUDGE
    + """
def fragile(texts, attacks):
    if any("+" in attack for attack in attacks):
        raise RuntimeError("broke")
    return digits(texts)
"""
)
SEEDS = [
    *({"prompt": "ask ", "completion": text} for text in ("12+3", "456", "4567", "456")),
    {"prompt": "say ", "completion": "9"},
    {"prompt": "ask ", "completion": "123456789"},
    {"prompt": "say ", "completion": "1234"},
]


@pytest.fixture(scope="module")
def seeded(run, tmp_path_factory):
    """A run that starts with attacks, of which one breaks the classifier and one is too long."""
    folder, source = tmp_path_factory.mktemp("seeded"), run.parent
    (folder / "judge.py").write_text(FRAGILE)
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SEEDS))
    settings = {
        "task.attack_prompt": "none",
        "task.train_file": folder / "sft.jsonl",
        "task.classifier": f"{folder}/judge.py:fragile",
        "buffer.given": "demonstrations",
        "buffer.off_policy_sampling": "uniform",
        "trainer.steps": 2,
        "trainer.samples_per_query": 2,
        "runtime.kind": "inline",
    }
    words = [f"--{name}={value}" for name, value in settings.items()]
    told = tba("train", source / "run.toml", "--run-dir", folder / "run", *words)
    return folder / "run", told


def test_given_attacks_start_the_buffer_with_the_reward_that_the_victim_gives_them(seeded):
    path, told = seeded
    rows = rollouts(path)
    given = [row for row in rows if row["searcher"] == -1]
    assert rows[: len(given)] == given, "they come first"
    # by prompt, in the order of the file; "123456789" has ten tokens with its end, more than six
    assert [row["text"] for row in given] == ["12+3", "456", "4567", "456", "9", "1234"]
    assert [row["query_id"] for row in given] == [0, 0, 0, 0, 1, 1], "a query is a prompt"
    assert [row["outcome"] for row in given] == ["error"] + ["ok"] * 5
    assert "RuntimeError: broke" in given[0]["detail"]
    assert math.isnan(given[0]["reward"])
    assert "the buffer starts with 6 given demonstrations" in told
    assert "skipped given demonstrations: 1 with an answer longer" in told
    assert "1 of these could not be scored" in told
    (options,) = load_redteam(RunFolder(path).config().task, tokenizer_of(path)).reward.options
    by_hand = AttackReward(**options)
    for row in given[1:]:
        (graded,) = by_hand([row["text"]], [row["tokens"]])
        probabilities = dict(row["extras"])["probabilities"]
        assert probabilities == pytest.approx(graded["probabilities"].tolist(), rel=1e-5)
        assert row["reward"] == pytest.approx(graded["score"], rel=1e-5)
    assert len({row["reward"] for row in given[1:]}) == 4  # "456" is there twice
    assert given[4]["reward"] == pytest.approx(math.log(1e-8)), "two tokens are too few"


def tokenizer_of(path):
    return AutoTokenizer.from_pretrained(path / "model")


def test_given_attacks_are_counted_and_the_failing_one_is_left_out(seeded):
    path, _ = seeded
    rows = rollouts(path)
    counts = json.loads((path / "summary.json").read_text())["trajectories"]
    failed = sum(row["outcome"] != "ok" for row in rows)
    different = {(row["query_id"], *row["tokens"]) for row in rows if row["outcome"] == "ok"}
    assert counts["excluded"] == failed >= 1
    assert counts["kept"] == len(different)
    assert counts["kept"] + counts["duplicate"] + counts["excluded"] == len(rows)


def test_what_a_log_lacks_of_the_attacks_of_a_prompt_is_added_in_order(seeded):
    path, _ = seeded
    config = RunFolder(path).config()
    policy = load_policy(
        path / "model", ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
    )
    task = load_redteam(config.task, policy.tokenizer, given="demonstrations")
    found = read_given("demonstrations", task, policy, longest=6)
    assert [a.text for _, a in found.missing({0: 2, 1: 1})] == ["4567", "456", "1234"]
    assert found.missing({0: 4, 1: 2}) == []
    assert found.too_long == 1


def test_the_last_attack_of_a_file_may_fail_alone_but_not_all_of_them(seeded):
    path, _ = seeded
    policy = load_policy(
        path / "model", ModelConfig(), device=torch.device("cpu"), dtype=torch.float32
    )
    task = load_redteam(RunFolder(path).config().task, policy.tokenizer, given="demonstrations")
    found = read_given("demonstrations", task, policy, longest=6)
    missing = found.missing({0: 4, 1: 1})

    class Broken:
        def score(self, queries, tokens):
            return ["1234"], [Score(Outcome.ERROR, math.nan, "broke")]

    class Flat:
        def log_ref(self, prompts, tokens, places):
            return [np.zeros(len(own), np.float32) for own in tokens]

    (batch,) = batches(missing, Flat(), Broken(), 1.0, is_first=False)
    assert batch.column("outcome").to_pylist() == ["error"]
    with pytest.raises(AllExcludedError, match="none of the first 1 given answers"):
        list(batches(missing, Flat(), Broken(), 1.0, is_first=True))


@pytest.mark.slow
def test_samples_of_a_run_by_cosine_bring_their_embeddings_and_merge_as_by_hand(run, tmp_path):
    source = run.parent
    words = [
        *("--runtime.kind=inline", "--trainer.steps=2", "--trainer.samples_per_query=2"),
        *("--buffer.near_duplicates.kind=cosine", "--buffer.near_duplicates.above=0.2"),
        *(f"--task.embedder={source}/victim", f"--run-dir={tmp_path}/run"),
    ]
    tba("train", source / "run.toml", *words)
    rows = rollouts(tmp_path / "run")
    told = np.array([dict(row["extras"])["embedding"] for row in rows])
    by_hand = Embedder(str(source / "victim"), "cpu")([row["text"].strip() for row in rows])
    np.testing.assert_allclose(told, by_hand, atol=1e-5)
    with RolloutLog(tmp_path / "run/rollouts.arrows") as log:
        config = RunFolder(tmp_path / "run").config()
        buffer = rebuild_buffer(log.read(), config, None, 2).buffer
        sizes = [batch.num_rows for batch in log.read()]
    held, first = {}, 0
    for size in sizes:
        part = slice(first, first + size)
        delivered = [
            (row["query_id"], tuple(row["tokens"]), row["reward"], tuple(embedding.tolist()))
            for row, embedding in zip(rows[part], told[part], strict=True)
        ]
        add_plainly(held, delivered, 0.2)
        first += size
    kept = {tuple(tokens.tolist()) for tokens in buffer.tokens("token", buffer.samples(0))}
    assert kept == set(held[0])
    counts = json.loads((tmp_path / "run/summary.json").read_text())["trajectories"]
    assert (counts["kept"], counts["duplicate"]) == (buffer.kept, buffer.duplicate)
    assert buffer.duplicate > 0


def test_cosines_without_an_encoder_are_refused(run):
    words = ["train", str(run.parent / "run.toml"), "--buffer.near_duplicates.kind=cosine"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "there is no task.embedder" in " ".join(result.output.split())


def test_a_victim_that_can_score_no_given_attack_ends_the_run(run, tmp_path):
    (tmp_path / "judge.py").write_text(FRAGILE)
    (tmp_path / "sft.jsonl").write_text('{"prompt": "ask ", "completion": "1+11"}\n')
    words = [
        "--task.attack_prompt=none",
        f"--task.train_file={tmp_path}/sft.jsonl",
        f"--task.classifier={tmp_path}/judge.py:fragile",
        "--buffer.given=demonstrations",
        f"--run-dir={tmp_path}/run",
    ]
    result = CliRunner().invoke(app, ["train", str(run.parent / "run.toml"), *words])
    assert result.exit_code == 1
    assert "none of the first 1 given answers could be scored" in result.output
    assert not (tmp_path / "run").exists(), "with a repaired classifier the same command begins"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--buffer.given=demonstrations"], "has no attacks to give"),
        (["--warm_start.steps=3"], "has no demonstrations to imitate"),
    ],
)
def test_attacks_that_nobody_gives_are_refused(run, words, sentence):
    result = CliRunner().invoke(app, ["train", str(run.parent / "run.toml"), *words])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
