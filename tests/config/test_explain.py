import pytest

from tba.config.explain import nearest
from tba.config.load import load_config
from tba.errors import ConfigError


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["arithmetic"], overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("--trainer.learning_rat=3", "trainer.learning_rate"),
        ("--trainer.temperature=3", "search.temperature"),
        ("--temperature=3", "search.temperature"),
        ("--sync.sync-evry=3", "sync.sync_every"),
        ("--model.build.hiden_size=3", "model.build.hidden_size"),
        ("--beta=3", "objective.beta"),
        ("--sede=3", "seed"),
        ("--trainr.steps=3", "trainer.steps"),
    ],
)
def test_unknown_key_suggests_the_nearest_of_all_sections(override, suggestion):
    assert refusal(override).endswith(f"(did you mean {suggestion}?)")


def test_unlike_anything_gets_no_suggestion():
    assert refusal("--xyzzy=3") == "there is no setting xyzzy"


def test_a_key_of_another_kind_says_which_kind():
    assert refusal("--runtime.kind=inline", "--runtime.max_restarts=3") == (
        "runtime.max_restarts is a setting only with runtime.kind = local: set that or leave it out"
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("--trainer.steps=abc", 'trainer.steps is "abc", expected integer > 0'),
        ("--trainer.steps=true", "trainer.steps is true, expected integer > 0"),
        ("--trainer.steps=1.5", "trainer.steps is 1.5, expected integer > 0"),
        ("--trainer.steps=0", "trainer.steps is 0, expected integer > 0"),
        ("--trainer.learning_rate=nan", "trainer.learning_rate is nan, expected number > 0"),
        ("--trainer.learning_rate=inf", "trainer.learning_rate is inf, expected number > 0"),
        ("--trainer.adam_beta1=1", "trainer.adam_beta1 is 1, expected number >= 0 and < 1"),
        ("--buffer.max_reuse=-1", "buffer.max_reuse is -1, expected integer > 0 or none"),
        ("--trainer.steps=none", 'trainer.steps is "none", expected integer > 0'),
        ("--model.build.hidden_size=0", "model.build.hidden_size is 0, expected integer > 0"),
        ("--task.left=[1]", "task.left is [1], expected [integer >= 0, integer >= 0]"),
        ("--task.operators=['%']", 'task.operators is ["%"], expected list of one of +, -, *'),
        ("--sync=3", "sync is 3, expected a table, as for sync.mode"),
        ("--model.build=3", "model.build is 3, expected a table, as for model.build.characters"),
        ("--num_generations=4", "there is no setting num_generations: here it is trainer.samples"),
        ("--lora_r=4", "there is no setting lora_r: here it is model.lora.rank"),
        (
            "--objective.epsilon=.2",
            "there is no setting objective.epsilon: here it is objective.cl",
        ),
        (
            "--sync.mode=fre",
            'sync.mode is "fre", expected one of free, barrier, lockstep (did you mean free?)',
        ),
        (
            "--task.kind=gsm",
            'task.kind is "gsm", expected one of arithmetic, gsm8k, math, gym, verifiers, custom, '
            "preference, redteam "
            "(did you mean gsm8k?)",
        ),
        (
            "--objective.beta.kind=linear_then_cut",
            "objective.beta.start is missing, expected number > 0: Beta at the first step; and "
            "objective.beta.end is missing, expected number > 0: Beta from `cut_at` on",
        ),
        (
            "--trainer.steps",
            "--trainer.steps has no value: write --trainer.steps value or --trainer",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(override, sentence):
    assert refusal(override).startswith(sentence)


def test_an_override_is_not_taken_for_the_value_of_the_one_before():
    assert refusal("--trainer.steps", "--seed", "3").startswith("--trainer.steps has no value")


def test_a_word_that_is_no_override_is_refused():
    assert refusal("trainer.steps=3") == (
        "trainer.steps=3 is not an override: write --section.key value"
    )


def test_rules_across_sections_speak_for_themselves():
    found = refusal("--trainer.samples_per_query=99")
    assert found.startswith("trainer.samples_per_query (K) is 99 but search.samples_per_query (S)")


def test_at_most_two_errors_are_told_in_one_line():
    found = refusal("--trainer.steps=0", "--seed=-1", "--sync.mode=x", "--foo=1")
    assert found.count("; and ") == 1
    assert "\n" not in found


def test_long_values_are_cut():
    assert len(refusal(f"--trainer.steps={'x' * 1000}")) < 150


def test_nearest_prefers_the_same_section_among_equal_last_parts():
    known = ["trainer.samples_per_query", "search.samples_per_query"]
    assert nearest("serch.samples_per_query", known) == "search.samples_per_query"
    assert nearest("anything", []) is None


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["--objective.kind=dr_grpo", "--objective.beta=0.1"],
            "objective.beta is no setting of objective.kind = dr_grpo: leave it out",
        ),
        (
            ["--objective.kind=dr_grpo", "--objective.beta.value=0.1"],
            "objective.beta.value is no setting of objective.kind = dr_grpo: leave it out",
        ),
        (["--objective.beta=-1"], "objective.beta.value is -1, expected number > 0"),
        (
            ["--objective.kind=grpo", "--objective.beta=-1"],
            "objective.beta is -1, expected number >= 0",
        ),
        (
            ["--objective.beta=much"],
            'objective.beta is "much", expected a table, as for objective.beta.kind',
        ),
        (
            ["--objective.kind=custom", "--objective.function=a:b", "--objective.scale=2"],
            "objective.scale is no setting: a parameter of your function is "
            "objective.settings.scale",
        ),
        (
            ["--objective.kind=custom", "--objective.function=a:b", "--objective.settings.s=x"],
            'objective.settings.s is "x", expected number',
        ),
    ],
)
def test_settings_of_objectives_are_explained_as_those_of_the_chosen_kind(overrides, sentence):
    assert refusal(*overrides) == sentence
