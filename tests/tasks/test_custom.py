"""Tasks of one's own, from a Python file or from data files."""

import json

import pytest

from tba.config import CustomTaskConfig
from tba.errors import DataError, ModelError, UserCodeError
from tba.records import Outcome
from tba.tasks import Scorer, load_task

TASK = """
def train_rows():
    return [{"prompt": f"{n}+1=", "sum": n + 1} for n in range(20)]

def reward(completions, sum, **columns):
    return [float(c == str(s)) for c, s in zip(completions, sum)]
"""


@pytest.fixture
def task_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(queries):
    return [q.prompt for q in queries]


def test_python_file_gives_rows_and_reward(task_file, tokenizer):
    task = load_task(CustomTaskConfig(file=task_file), tokenizer)
    assert (len(task.train), len(task.test), task.demonstrations) == (18, 2, None)
    assert task.reward.functions == (f"{task_file}:reward",)
    first = task.train[0]
    with Scorer(task.reward) as scorer:
        right, wrong = scorer.score(
            [first] * 2, [str(first.columns["sum"]), "0"], [first.prompt_ids] * 2
        )
    assert (right.outcome, right.reward, wrong.reward) == (Outcome.OK, 1.0, 0.0)


def test_python_file_may_bring_its_own_test_rows(task_file, tokenizer):
    task_file.write_text(TASK + "def test_rows():\n    yield {'prompt': '7', 'sum': 7}\n")
    task = load_task(CustomTaskConfig(file=task_file), tokenizer)
    assert (len(task.train), prompts(task.test)) == (20, ["7"])


def test_held_out_rows_are_the_same_every_time(rows_file, tokenizer):
    config = CustomTaskConfig(train_file=rows_file, reward=("exact_match",), test_share=0.25)
    task, again = load_task(config, tokenizer), load_task(config, tokenizer)
    assert len(task.test) == 5
    assert prompts(task.test) == prompts(again.test)
    assert sorted(prompts([*task.train, *task.test])) == sorted(f"{n}+1=" for n in range(20))


def test_test_file_is_held_out_whole(rows_file, tmp_path, tokenizer):
    test_file = tmp_path / "test.csv"
    test_file.write_text("prompt,answer\n8+8=,16\n")
    config = CustomTaskConfig(train_file=rows_file, test_file=test_file, reward=("exact_match",))
    task = load_task(config, tokenizer)
    assert (len(task.train), prompts(task.test)) == (20, ["8+8="])


def test_reward_names_and_weights_are_resolved(rows_file, task_file, monkeypatch, tokenizer):
    monkeypatch.chdir(task_file.parent)
    names = ("exact_match", "mine.py:reward", "package.module:function")
    config = CustomTaskConfig(train_file=rows_file, reward=names, reward_weights=(1.0, 0.5, 2.0))
    spec = load_task(config, tokenizer).reward
    assert spec.functions == (
        "tba.tasks.rewards:exact_match",
        f"{task_file}:reward",
        "package.module:function",
    )
    assert spec.weights == (1.0, 0.5, 2.0)


def test_unknown_short_name_gets_a_suggestion(rows_file, tokenizer):
    config = CustomTaskConfig(train_file=rows_file, reward=("exact_mach",))
    with pytest.raises(UserCodeError, match=r"'exact_mach': did you mean 'exact_match'\?"):
        load_task(config, tokenizer)


@pytest.fixture
def chat_file(tmp_path):
    path = tmp_path / "chat.json"
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "label": n} for n in range(4)]
    path.write_text(json.dumps(rows))
    return path


def test_messages_are_rendered_by_the_chat_template(chat_file, chat_tokenizer):
    task = load_task(
        CustomTaskConfig(train_file=chat_file, reward=("last_number",)), chat_tokenizer
    )
    query = task.train[0]
    assert query.columns["prompt"] == [{"role": "user", "content": f"{query.columns['label']}?"}]
    assert query.prompt == f"<s>[user]{query.columns['label']}?[assistant]"
    assert query.columns["answer"] == query.columns["label"]


def test_messages_without_a_chat_template_are_refused(chat_file, tokenizer):
    with pytest.raises(ModelError, match="no chat template"):
        load_task(CustomTaskConfig(train_file=chat_file, reward=("last_number",)), tokenizer)


def test_chat_template_that_refuses_a_prompt_is_named(chat_file, chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ModelError, match=r"chat template refuses a prompt .* no users here"):
        load_task(CustomTaskConfig(train_file=chat_file, reward=("last_number",)), chat_tokenizer)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("def reward(): pass", DataError, r"mine\.py defines no train_rows\(\)"),
        ("def train_rows(): return []", DataError, r"train_rows\(\) of .*mine\.py has no rows"),
        ("def train_rows(): return ['a']", DataError, "row 1 .* is a str, expected an object"),
        (
            "def train_rows(): return 1 / 0",
            UserCodeError,
            r"train_rows\(\) .* failed: ZeroDivisionError",
        ),
        ("def train_rows(): return [{'prompt': 'a'}]", DataError, "one row only"),
        ("import nowhere", UserCodeError, "mine.py cannot be imported: ModuleNotFoundError"),
    ],
)
def test_bad_python_file_is_refused(task_file, tokenizer, source, error, message):
    task_file.write_text(source)
    with pytest.raises(error, match=message):
        load_task(CustomTaskConfig(file=task_file), tokenizer)
