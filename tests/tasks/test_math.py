"""GSM8K and MATH: gold answers grade correct, prompts and demonstrations are what they say."""

import json

import numpy as np
import pytest

from data_sets import find_data
from tba.config import Gsm8kTaskConfig, MathTaskConfig
from tba.errors import ConfigError, DataError
from tba.tasks import Scorer, load_task
from tba.tasks.grading import math
from tba.tasks.rewards import gsm8k

ROWS = [
    {"question": "What is 2 + 3?", "answer": "2+3=<<2+3=5>>5.\n#### 5"},
    {"question": "What is 999 + 1?", "answer": "That is\n#### 1,000"},
]


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


MATH_ROWS = [
    {"problem": "Half of 1?", "solution": "It is $\\boxed{\\frac12}$.", "level": "Level 1"},
    {"problem": "1 + 1?", "solution": "We add.", "answer": "2"},
    {"problem": "2 + 2?", "answer": 4},
    {"question": "2 + 3?", "answer": "2+3=5\n#### 5"},
    {"question": "2 + 4?", "answer": "So \\boxed{6}."},
]


@pytest.fixture
def math_config(tmp_path):
    train = write(tmp_path / "math_train.jsonl", MATH_ROWS)
    test = write(tmp_path / "math_test.jsonl", MATH_ROWS[:1])
    return MathTaskConfig(train_file=train, test_file=test)


def test_math_takes_its_answers_from_either_column(math_config, tokenizer):
    task = load_task(math_config, tokenizer)
    answers = [query.columns["answer"] for query in task.train]
    assert answers == ["\\frac12", "2", "4", "5", "6"]
    assert task.demonstrations[:3] == [MATH_ROWS[0]["solution"], "We add.", "\\boxed{4}"]
    assert math([task.demonstrations[0], task.demonstrations[2]], answer=["0.5", "4"]) == [1, 1]
    assert task.train[0].columns["level"] == "Level 1"
    with Scorer(task.reward) as scorer:
        texts = ["\\boxed{1/2}", "The answer is 3.", "4.0", "#### 5", ""]
        scores = scorer.score(task.train, texts, [np.zeros(1, np.int32)] * 5)
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_math_asks_for_a_box_and_other_templates_go_by_name(math_config, config, tokenizer):
    boxed = load_task(math_config, tokenizer).train[3].prompt
    assert boxed.startswith("2 + 3?\n")
    assert boxed.endswith("your final answer within \\boxed{}.")
    for given in (math_config, config):
        template = given.model_copy(update={"prompt_template": "paper"})
        asked = load_task(template, tokenizer).train[0].prompt
        problem = "Half of 1?" if given is math_config else "What is 2 + 3?"
        assert asked == f"[MATH_TASK] Problem:\n{problem}\n\nSolution:"
    plain = math_config.model_copy(update={"prompt_template": "plain"})
    assert load_task(plain, tokenizer).train[0].prompt == "Half of 1?"


def test_a_template_that_is_neither_name_nor_text_is_refused(math_config, tokenizer):
    config = math_config.model_copy(update={"prompt_template": "papr"})
    with pytest.raises(ConfigError, match=r"did you mean paper\? give one of plain, paper, boxed"):
        load_task(config, tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "?"}, "row 2 of .* has neither column 'answer' nor 'solution'"),
        ({"problem": "?", "solution": "It is 5."}, "row 2 of .* has no final answer of at most"),
        ({"problem": "?", "answer": "7" * 400}, "row 2 of .* has no final answer of at most"),
        ({"answer": "5"}, "row 2 of .* has no column 'problem'; it has answer"),
    ],
)
def test_a_row_without_a_final_answer_is_named(math_config, tokenizer, row, message):
    write(math_config.train_file, [MATH_ROWS[0], row])
    with pytest.raises(DataError, match=message):
        load_task(math_config, tokenizer)
