"""Data sets of reasoning-gym: questions, answers and scores, through the real scoring process."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from pydantic import TypeAdapter

from tba.config import GymTaskConfig, TaskConfig
from tba.config.load import load_config
from tba.errors import ConfigError
from tba.tasks import Scorer, load_task
from tba.tasks.gym import EVALUATING, find_tagged_answer, load_gym, score

pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")

NO_EXAMPLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets whose items have no example answer."""


def config(**settings):
    small = {"dataset": "chain_sum", "train_queries": 20, "test_queries": 10}
    return TypeAdapter(TaskConfig).validate_python({"kind": "gym"} | small | settings)


def test_questions_are_reproducible_and_no_held_out_one_is_trained_on(tokenizer):
    task, again = (load_task(config(), tokenizer) for _ in range(2))
    train, test = ([q.columns["question"] for q in split] for split in (task.train, task.test))
    assert (len(set(train)), len(set(test)), set(train) & set(test)) == (20, 10, set())
    assert [q.columns["question"] for q in again.train] == train
    other = load_task(config(split_seed=1000), tokenizer)
    assert train != [q.columns["question"] for q in other.train]
    assert task.train[0].prompt.startswith(train[0])
    assert task.train[0].prompt.endswith("between <answer> and </answer>.")


def test_its_own_options_reach_the_data_set(tokenizer):
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task(config(options=options, prompt_template="plain"), tokenizer)
    assert all(len(q.columns["entry"]["metadata"]["expression"]) == 5 for q in task.train)
    assert task.train[0].prompt == task.train[0].columns["question"]


def test_its_own_options_are_settings_like_any_other(tmp_path):
    recipe = tmp_path / "sums.toml"
    recipe.write_text('[task]\nkind = "gym"\ndataset = "chain_sum"\noptions = { min_terms = 2 }\n')
    overrides = ["--task.options.max_terms", "3", "--model.model_name_or_path", "m"]
    assert load_config([str(recipe)], overrides).task.options == {"min_terms": 2, "max_terms": 3}


def test_the_answer_alone_is_scored_in_the_scoring_process(tokenizer):
    task = load_task(config(), tokenizer)
    query = pickle.loads(pickle.dumps(task.train[0]))
    answer = query.columns["entry"]["answer"]
    texts = {
        f"<answer>{answer}</answer>": 1.0,
        f"I think. <answer>1</answer> No: <answer> {answer}\n</answer>": 1.0,
        f"So \\boxed{{{answer}}}.": 1.0,
        answer: 1.0,
        f"The answer is {answer}.": 0.0,
        f"<answer>{answer}": 0.0,
        f"{answer} <answer></answer>": 0.0,
        "": 0.0,
    }
    n = len(texts)
    with Scorer(task.reward) as scorer:
        scores = scorer.score([query] * n, list(texts), [np.zeros(1, np.int32)] * n)
        demonstrated = scorer.score(task.train, task.demonstrations, [np.zeros(1, np.int32)] * 20)
    assert [s.reward for s in scores] == list(texts.values())
    assert [s.reward for s in demonstrated] == [1.0] * 20


def test_tags_come_before_boxes():
    assert find_tagged_answer(r"\boxed{1} <answer>a\nb</answer> \boxed{2}") == r"a\nb"
    assert find_tagged_answer("1") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums': did you mean chain_sum"),
        (
            {"options": {"terms": 2}},
            "cannot make data set chain_sum .*'terms'.*: it has the options min_terms,",
        ),
        ({"options": {"min_terms": 9}}, "cannot make data set chain_sum .*max_terms"),
        (
            {"options": {"max_terms": 2, "max_digits": 1}, "train_queries": 5000},
            "is 5010, but 20040 draws from data set chain_sum gave only [0-9]+ different questions",
        ),
    ],
)
def test_what_the_library_cannot_make_is_told(tokenizer, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_task(config(**settings), tokenizer)


@pytest.mark.parametrize("name", ["countdown", "n_queens", "puzzle24", "composite"])
def test_data_sets_whose_scorers_run_what_the_policy_writes_are_refused(tokenizer, name):
    with pytest.raises(ConfigError, match=f"task.dataset is {name}, whose scorer .* as Python"):
        load_task(config(dataset=name), tokenizer)


def test_a_missing_library_names_the_extra():
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from tba.config import GymTaskConfig\nfrom tba.tasks.gym import load_gym\n"
        "load_gym(GymTaskConfig(dataset='chain_sum'), None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "the package reasoning_gym is not installed: pip install" in done.stderr
    assert ".[gym]" in done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_every_data_set_scores_its_own_example_answers_in_full(tokenizer):
    from reasoning_gym.factory import DATASETS

    refused = set()
    for name in sorted(set(DATASETS) - EVALUATING):
        made = GymTaskConfig(dataset=name, train_queries=4, test_queries=1, max_prompt_length=10**6)
        task = load_gym(made, tokenizer)
        columns = [query.columns for query in task.train]
        if task.demonstrations is None:
            refused.add(name)
            continue
        rewards = score(
            task.demonstrations,
            dataset=[c["dataset"] for c in columns],
            options=[c["options"] for c in columns],
            entry=pickle.loads(pickle.dumps([c["entry"] for c in columns])),
        )
        if rewards != [1.0] * len(rewards):
            refused.add(name)
    assert refused == NO_EXAMPLE
