"""Arithmetic questions: their split, their prompts, their answers."""

import pytest

from tba.config import ArithmeticTaskConfig
from tba.errors import ConfigError, DataError, ModelError
from tba.tasks import load_task


def questions(queries):
    return [(q.columns["a"], q.columns["op"], q.columns["b"]) for q in queries]


def small(**changes):
    settings = {"left": (10, 99), "right": (1, 9), "train_queries": 610, "test_queries": 200}
    return ArithmeticTaskConfig(**(settings | changes))


def test_split_covers_the_whole_space_without_overlap(tokenizer):
    task = load_task(small(), tokenizer)
    train, test = set(questions(task.train)), set(questions(task.test))
    assert (len(train), len(test)) == (610, 200)
    assert not train & test
    assert train | test == {(a, "+", b) for a in range(10, 100) for b in range(1, 10)}


def test_split_depends_on_its_seed_alone(tokenizer):
    first, again = load_task(small(), tokenizer), load_task(small(), tokenizer)
    other = load_task(small(split_seed=1), tokenizer)
    assert questions(first.train) == questions(again.train)
    assert questions(first.train) != questions(other.train)


def test_large_space_gives_distinct_questions_of_all_sizes(tokenizer):
    config = ArithmeticTaskConfig(
        left=(0, 10**9), right=(0, 10**9), train_queries=2000, test_queries=500
    )
    task = load_task(config, tokenizer)
    drawn = questions(task.train) + questions(task.test)
    assert len(set(drawn)) == 2500
    # The mean of 2,500 uniform draws has a standard error of 0.0058: 0.03 is five of them.
    assert sum(a for a, _, _ in drawn) / 2500 / 10**9 == pytest.approx(0.5, abs=0.03)
    assert sum(b for _, _, b in drawn) / 2500 / 10**9 == pytest.approx(0.5, abs=0.03)


def test_answers_are_those_of_python(tokenizer):
    config = small(operators=("+", "-", "*"), left=(0, 20), right=(0, 20), train_queries=1000)
    task = load_task(config, tokenizer)
    for query, demonstration in zip(task.train, task.demonstrations, strict=True):
        a, op, b = (query.columns[name] for name in ("a", "op", "b"))
        assert (
            query.columns["answer"]
            == demonstration
            == str({"+": a + b, "-": a - b, "*": a * b}[op])
        )
    assert {q.columns["op"] for q in task.train} == {"+", "-", "*"}
    assert any(q.columns["answer"].startswith("-") for q in task.train)


def test_query_ids_are_positions(tokenizer):
    task = load_task(small(), tokenizer)
    assert [q.query_id for q in task.train] == list(range(610))
    assert [q.query_id for q in task.test] == list(range(200))


def test_plain_prompt_gets_the_tokenizers_special_tokens(tokenizer):
    query = load_task(small(), tokenizer).train[0]
    a, _, b = questions([query])[0]
    assert query.prompt == query.columns["prompt"] == f"{a}+{b}="
    assert query.prompt_ids.tolist() == tokenizer(query.prompt)["input_ids"]
    assert query.prompt_ids[0] == tokenizer.bos_token_id


def test_chat_prompt_ends_with_the_answer_prefix_and_has_one_bos(chat_tokenizer):
    config = small(
        chat=True,
        system_prompt="Add.",
        prompt_template="What is {a} {op} {b}?",
        answer_prefix="{a} {op} {b} =",
    )
    query = load_task(config, chat_tokenizer).train[0]
    a, op, b = questions([query])[0]
    asked = f"What is {a} {op} {b}?"
    assert query.columns["prompt"] == asked
    assert query.prompt == f"<s>[system]Add.[user]{asked}[assistant]{a} {op} {b} ="
    assert query.prompt_ids.tolist().count(chat_tokenizer.bos_token_id) == 1


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(ModelError, match="tokenizer has no chat template"):
        load_task(small(chat=True), tokenizer)


def test_system_prompt_without_chat_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"system_prompt .* set task\.chat"):
        load_task(small(system_prompt="Add."), tokenizer)


@pytest.mark.parametrize("template", ["{c}=", "{a", "{}+{}=", "{a.x}"])
def test_unknown_placeholder_is_refused(tokenizer, template):
    with pytest.raises(ConfigError, match=r"task\.prompt_template .* \{a\}, \{op\}, \{b\}"):
        load_task(small(prompt_template=template), tokenizer)


def test_long_prompts_are_counted_and_left_out(tokenizer):
    config = (
        ArithmeticTaskConfig(  # one token for <s>, three for "+", "=" and b, one to three for a
            left=(0, 199), right=(0, 9), train_queries=1500, test_queries=500, max_prompt_length=6
        )
    )
    task = load_task(config, tokenizer)
    assert task.skipped == 1000
    assert len(task.train) + len(task.test) == 1000
    assert all(q.columns["a"] < 100 and len(q.prompt_ids) <= 6 for q in task.train)
    assert len(task.demonstrations) == len(task.train)
    assert [q.columns["answer"] for q in task.train] == task.demonstrations


def test_no_prompt_short_enough_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"every one of the 610 prompts .*the shortest has 6"):
        load_task(small(max_prompt_length=3), tokenizer)
