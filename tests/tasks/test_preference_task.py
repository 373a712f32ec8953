"""The task of preference tuning: rows, reward, judge and given answers as configured."""

import json

import pytest
from pydantic import ValidationError

from tba.config import CustomTaskConfig, PreferenceTaskConfig
from tba.config.load import load_config
from tba.errors import ConfigError, DataError, UserCodeError
from tba.tasks import load_task


@pytest.fixture
def rows_file(tmp_path):
    return write(tmp_path, [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(20)])


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_reward_model_and_a_judge_are_named_with_what_they_read(rows_file, tokenizer):
    config = PreferenceTaskConfig(
        train_file=rows_file,
        reward_model="rm",
        missing_eos_penalty=-1.0,
        judge="gold/rm",
        judge_label="good",
        scored_text="Q: {prompt} A: {completion}",
        scoring_device="cpu",
    )
    task = load_task(config, tokenizer, eos_ids=(7, 1))
    assert task.reward.functions == ("tba.tasks.reward_model:RewardModel",)
    assert task.reward.setting == "task.reward_model (rm)"
    assert task.reward.options == (
        {
            "name": "rm",
            "label": None,
            "template": "Q: {prompt} A: {completion}",
            "chat": False,
            "device": "cpu",
            "dtype": "float32",
        },
    )
    assert (task.reward.missing_eos_penalty, task.reward.eos_ids) == (-1.0, (7, 1))
    assert task.pass_threshold is None
    assert task.compares_with_reference
    (measure,) = task.measures
    assert measure._judge.options[0] == {
        **task.reward.options[0],
        "name": "gold/rm",
        "label": "good",
    }
    assert measure._judge.missing_eos_penalty is None
    assert measure._judge.setting == "task.judge (gold/rm)"


def test_functions_may_take_the_place_of_both_models(rows_file, tokenizer):
    config = PreferenceTaskConfig(train_file=rows_file, reward=("exact_match",), judge="m:f")
    task = load_task(config, tokenizer)
    assert task.reward.functions == ("tba.tasks.rewards:exact_match",)
    assert task.reward.eos_ids == (tokenizer.eos_token_id,)
    assert task.measures[0]._judge.functions == ("m:f",)
    assert (task.reward.setting, task.measures[0]._judge.setting) == (None, "task.judge (m:f)")
    plain = load_task(
        PreferenceTaskConfig(train_file=rows_file, reward=("exact_match",)), tokenizer
    )
    assert not plain.compares_with_reference


def test_rows_hold_out_and_pairs_are_those_of_a_custom_task(rows_file, tokenizer):
    own = PreferenceTaskConfig(train_file=rows_file, reward_model="rm", test_share=0.25)
    custom = CustomTaskConfig(train_file=rows_file, test_share=0.25)
    task, like = (load_task(config, tokenizer, given="pairs") for config in (own, custom))
    for mine, its in ((task.train, like.train), (task.test, like.test)):
        assert [query.prompt for query in mine] == [query.prompt for query in its]
    assert task.pairs == like.pairs
    assert len(task.test) == 5


def test_the_answers_of_held_out_rows_are_what_the_policy_is_compared_with(tmp_path, tokenizer):
    test = tmp_path / "test.json"
    message = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "said"}]
    rows = [
        {"prompt": "1", "completion": "text", "chosen": "other"},
        {"prompt": "2", "chosen": message},
        {"prompt": "3", "completion": None},
    ]
    test.write_text(json.dumps(rows))
    config = PreferenceTaskConfig(
        train_file=write(tmp_path, [{"prompt": "1"}]), test_file=test, reward_model="rm"
    )
    assert load_task(config, tokenizer).measures[0]._given == ["text", "said", None]
    rows[1]["chosen"] = 5
    test.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"chosen of row 2 of .*test.json is 5, expected a text"):
        load_task(config, tokenizer)


def test_an_unknown_reward_function_is_refused(rows_file, tokenizer):
    with pytest.raises(UserCodeError, match="no built-in reward 'exact_macth': did you mean"):
        load_task(PreferenceTaskConfig(train_file=rows_file, reward=("exact_macth",)), tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set exactly one of them"),
        ({"reward_model": "rm", "reward": ("exact_match",)}, "set exactly one of them"),
        ({"reward": ("exact_match",), "reward_label": "good"}, r"there is no task\.reward_model"),
        ({"reward_model": "rm", "judge_label": "good"}, r"there is no task\.judge whose label"),
        ({"reward_model": "rm", "scored_text": "{question}"}, "the only placeholders are {prompt}"),
    ],
)
def test_settings_that_contradict_are_refused(rows_file, settings, message):
    with pytest.raises(ValidationError, match=message):
        PreferenceTaskConfig(train_file=rows_file, **settings)


def test_folders_and_files_of_the_task_become_absolute_and_hub_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rm").mkdir()
    settings = [
        "--task.kind=preference",
        "--task.train_file=rows.jsonl",
        "--model.build.hidden_size=16",
    ]
    task = load_config([], [*settings, "--task.reward_model=rm", "--task.judge=judge.py:f"]).task
    assert task.reward_model == str(tmp_path / "rm")
    assert task.judge == f"{tmp_path}/judge.py:f"
    assert task.train_file == tmp_path / "rows.jsonl"
    hub = load_config([], [*settings, "--task.reward_model=a/rm", "--task.judge=org/gold"]).task
    assert (hub.reward_model, hub.judge) == ("a/rm", "org/gold")


def test_accuracy_has_no_threshold_here(rows_file):
    settings = [
        "--task.kind=preference",
        f"--task.train_file={rows_file}",
        "--task.reward_model=rm",
    ]
    with pytest.raises(ConfigError, match="pass_threshold"):
        load_config([], [*settings, "--task.pass_threshold=1"])


def test_the_settings_of_the_papers_summaries_can_be_expressed(tmp_path):
    """Column TL;DR of the paper's table of hyper-parameters."""
    file = tmp_path / "tldr.toml"
    file.write_text("""
[model]
model_name_or_path = "mnoukhov/pythia410m-sft-tldr"
[task]
kind = "preference"
train_file = "train.jsonl"
test_file = "test.jsonl"
reward_model = "mnoukhov/pythia410m-rm-tldr6.9b"
missing_eos_penalty = -1.0
judge = "mnoukhov/pythia-6.9b-rm"
max_prompt_length = 512
[search]
searchers = 3
samples_per_query = 20
temperature = 0.7
max_completion_length = 128
[buffer]
capacity_per_query = 100
initial_samples = 10_000
on_policy_prob = 0.5
off_policy_sampling = "softmax_reward"
[objective]
kind = "tb"
beta = {kind = "linear_then_cut", start = 1.0, end = 0.05, end_at = 0.5, cut_at = 0.125}
[trainer]
steps = 256
queries_per_batch = 8
samples_per_query = 20
learning_rate = 3e-6
learning_rate_schedule = {kind = "linear"}
precision = "float32"
[sync]
sync_every = 10
""")
    config = load_config([str(file)])
    assert (config.task.missing_eos_penalty, config.sync.sync_every) == (-1.0, 10)
