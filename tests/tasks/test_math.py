"""GSM8K: gold answers grade correct, prompts and demonstrations are what they say."""

import json
import os
from pathlib import Path

import pytest

from tba.config import Gsm8kTaskConfig
from tba.errors import ConfigError, DataError
from tba.tasks import load_task
from tba.tasks.rewards import gsm8k

ROWS = [
    {"question": "What is 2 + 3?", "answer": "2+3=<<2+3=5>>5.\n#### 5"},
    {"question": "What is 999 + 1?", "answer": "That is\n#### 1,000"},
]


def find_data():
    """Return the folder of shared data sets, or None."""
    named = os.environ.get("TBA_DATA")
    roots = [Path(named)] if named else [p / "shared/data" for p in Path(__file__).parents]
    return next((root for root in roots if (root / "gsm8k/train.jsonl").is_file()), None)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path):
    train = write(tmp_path / "train.jsonl", ROWS)
    return Gsm8kTaskConfig(train_file=train, test_file=write(tmp_path / "test.jsonl", ROWS[:1]))


def test_prompt_asks_the_question_and_demonstration_solves_it(config, tokenizer):
    task = load_task(config, tokenizer)
    assert (len(task.train), len(task.test), task.skipped) == (2, 1, 0)
    assert task.train[0].prompt.startswith("What is 2 + 3?\n")
    assert task.demonstrations == ["2+3=5.\n#### 5", "That is\n#### 1,000"]
    assert gsm8k(task.demonstrations, answer=[row["answer"] for row in ROWS]) == [1.0, 1.0]


def test_long_questions_are_counted_and_left_out(tmp_path, tokenizer):
    long = ROWS[0] | {"question": "What?" * 200}
    train = write(tmp_path / "train.jsonl", [long, *ROWS])
    test = write(tmp_path / "test.jsonl", [*ROWS, long])
    task = load_task(Gsm8kTaskConfig(train_file=train, test_file=test), tokenizer)
    assert (len(task.train), len(task.test), task.skipped) == (2, 2, 2)
    assert [q.query_id for q in task.train] == [0, 1]
    assert task.demonstrations[1] == "That is\n#### 1,000"


def test_row_without_a_column_is_named(config, tokenizer):
    write(config.train_file, [ROWS[0], {"question": "?", "solution": "#### 1"}])
    message = r"row 2 of .*train\.jsonl has no column 'answer'; it has question, solution"
    with pytest.raises(DataError, match=message):
        load_task(config, tokenizer)


@pytest.mark.parametrize("answer", ["5", "#### five"])
def test_answer_without_a_final_number_is_refused(config, tokenizer, answer):
    write(config.train_file, [ROWS[0], {"question": "?", "answer": answer}])
    with pytest.raises(DataError, match=r"answer of row 2 of .* does not end in '#### number'"):
        load_task(config, tokenizer)


def test_unknown_placeholder_is_refused(config, tokenizer):
    config = config.model_copy(update={"prompt_template": "{problem}"})
    with pytest.raises(ConfigError, match=r"only placeholders are \{question\}"):
        load_task(config, tokenizer)


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_gold_solution_grades_correct(split, count):
    data = find_data()
    if data is None:
        pytest.skip("GSM8K is not at hand: set TBA_DATA to the folder that holds gsm8k/")
    lines = (data / f"gsm8k/{split}.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == count
    assert gsm8k(answers, answer=answers) == [1.0] * count
    finals = [answer.rpartition("####")[2].strip() for answer in answers]
    for written in ("{}", "The answer is {}.", "So it is ${}.00", "#### {}"):
        assert gsm8k([written.format(f) for f in finals], answer=answers).count(1.0) >= count - 5
    assert gsm8k([f"#### {f}1" for f in finals], answer=answers) == [0.0] * count


def test_a_placeholder_with_an_index_is_refused(config, tokenizer):
    config = config.model_copy(update={"prompt_template": "{question[0][0][1]}{question[a]}"})
    with pytest.raises(ConfigError, match=r"only placeholders are \{question\}"):
        load_task(config, tokenizer)


def test_a_prompt_that_is_no_unicode_is_named(config, tokenizer):
    write(config.train_file, [ROWS[0], {"question": "\ud800", "answer": "#### 5"}])
    with pytest.raises(DataError, match=r"prompt 2 \(.*ud800.* holds half a surrogate pair"):
        load_task(config, tokenizer)
