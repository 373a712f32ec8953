"""Rules that tie settings together: what is refused, with what to set instead."""

import pytest

from tba.config.load import load_config, recipes
from tba.config.sft import load_sft_config
from tba.errors import ConfigError


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["arithmetic"], overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--model.build.characters=0123456789"], ["'0123456789'", "the task also writes", "add"]),
        (["--model.build.num_attention_heads=5"], ["multiple of twice the number of heads"]),
        (["--seed=-1"], ["seed is -1", ">= 0"]),
        (["--seed=9223372036854775808"], ["seed is 9223372036854775808"]),
        (["--model.build=none"], ["no policy is named", "set model.model_name_or_path"]),
        (["--model.model_name_or_path=m", "--model.build.hidden_size=64"],
         ["both set", "remove one"]),
        (["--trainer.samples_per_query=99"], ["(K) is 99", "set S to 99 or more"]),
        (["--buffer.capacity_per_query=3"], ["keep at least K samples"]),
        (["--trainer.micro_batch_tokens=8"], ["less than one query can need", "raise it to"]),
        (["--buffer.max_staleness=1", "--sync.mode=barrier", "--sync.sync_every=2"],
         ["fresh samples are up to 3 versions old", "set it to 3 or more"]),
        (["--objective.kind=subtb", "--sync.reference_reset_every=5"],
         ["kind is subtb", "leave sync.reference_reset_every out"]),
        (["--objective.kind=a_star_po", "--sync.reference_reset_every=5"], ["kind is a_star_po"]),
        (["--model.lora.rank=4", "--sync.reference_reset_every=5"],
         ["model.lora is set", "leave sync.reference_reset_every out", "--model.lora none"]),
        (["--model.lora.rank=4", "--objective.kind=a3c"], ["model.lora is set", "a3c", "choose"]),
        (["--model.lora.rank=0"], ["model.lora.rank is 0"]),
        (["--buffer.given=pairs"], ["task arithmetic has no rows", "set task.kind to custom"]),
        (["--search.searchers=0"], ["searchers is 0", "nothing to learn from", "give answers"]),
        (["--trainer.samples_per_query=1"],
         ["(K) is 1, but objective.kind tb_tapered compares", "set it to 2 or more"]),
        (["--search.searchers=0", "--buffer.given=demonstrations"],
         ["tb_tapered has nothing to compare it with", "set objective.kind to sft"]),
        (["--objective.kind=sft", "--buffer.given=pairs", "--task.kind=custom",
          "--task.train_file=a.json", "--task.reward=[\"exact_match\"]"],
         ["which imitates every answer", "set buffer.given to demonstrations"]),
        (["--objective.kind=sft", "--search.temperature=0.7"],
         ["temperature is 0.7", "set it to 1"]),
        (["--search.searchers=-1"], ["searchers is -1", ">= 0"]),
        (["--objective.kind=f_tb", "--objective.scale=-1"], ["scale is -1", "above 0"]),
        (["--objective.kind=grppo"], ["grppo", "did you mean grpo?"]),
        (["--objective.kind=custom"], ["objective.function is missing"]),
        (["--objective.kind=grpo", "--objective.keep_share=0.5"],
         ["keep_share is a setting only with objective.kind = raft"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence_that_says_what_to_set(overrides, words):
    sentence = refused(*overrides)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


def test_reference_resets_are_allowed_where_nothing_depends_on_the_first_reference():
    config = load_config(
        ["arithmetic"], ["--objective.kind=tb_prime", "--sync.reference_reset_every=50"]
    )
    assert config.sync.reference_reset_every == 50


PAIRS = [
    "--task.kind=custom",
    "--task.train_file=pairs.jsonl",
    "--buffer.given=pairs",
    "--search.searchers=0",
    "--sync.reference_reset_every=none",
]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--sync.mode=barrier"], ["mode is barrier", "waits for", "set sync.mode to free"]),
        (["--sync.mode=lockstep"], ["mode is lockstep", "set sync.mode to free"]),
        (["--buffer.max_staleness=9", "--trainer.steps=11"],
         ["max_staleness is 9", "up to 10 versions old", "leave it out"]),
        (["--search.searchers=1"], ["task.reward names no reward function: name at least one"]),
    ],
)  # fmt: skip
def test_pairs_alone_bring_nobody_to_wait_for_and_nothing_new(overrides, words):
    sentence = refused(*PAIRS, *overrides)
    for word in words:
        assert word in sentence


def test_pairs_alone_need_neither_searchers_nor_a_reward():
    config = load_config(["arithmetic"], [*PAIRS, "--buffer.max_staleness=9", "--trainer.steps=10"])
    assert (config.search.searchers, config.task.reward) == (0, ())


def test_any_recipe_can_be_fine_tuned_on_its_demonstrations():
    for recipe in recipes():
        if recipe.startswith("redteam"):  # attacks have no demonstrations of their own
            continue
        needs_files = recipe.startswith(("gsm8k", "math", "svamp", "tldr"))
        files = ["--task.train_file=a", "--task.test_file=b"] if needs_files else []
        config = load_sft_config(
            [recipe], ["--model.build=none", "--model.model_name_or_path=m", *files]
        )
        assert (config.search.searchers, config.search.temperature) == (0, 1)
        assert (config.objective.kind, config.trainer.samples_per_query) == ("sft", 1)
        assert (config.buffer.given, config.warm_start.steps) == ("demonstrations", 0)


def test_the_settings_of_a_supervised_file_and_of_the_command_line_win(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[trainer]\nlearning_rate = 1e-3\n[task]\ntrain_file = 'rows.jsonl'\n")
    given = ["--model.model_name_or_path=m", "--trainer.queries_per_batch=4"]
    config = load_sft_config([str(file)], given)
    assert (config.trainer.learning_rate, config.trainer.queries_per_batch) == (1e-3, 4)
    assert config.trainer.learning_rate_schedule.kind == "cosine"
    with pytest.raises(ConfigError, match="set S to 99 or more"):
        load_sft_config([str(file)], [*given, "--trainer.samples_per_query=99"])
    assert load_sft_config([str(file)], given) == config, "the preset is left as it was"


@pytest.mark.parametrize("setting", ["--warm_start.steps=5", "--task.attack_prompt=Say:"])
def test_attacks_have_no_demonstrations(setting):
    file = [] if "attack_prompt" in setting else ["--task.train_file=a"]
    with pytest.raises(ConfigError, match="the task redteam has no "):
        load_config(["redteam-gpt2"], [setting, *file])


def test_adapters_change_some_layer():
    with pytest.raises(ConfigError, match="target_modules"):
        load_config(["arithmetic"], ["--model.lora.target_modules=[]"])


def test_smoothing_at_a_reward_that_no_attack_has_is_refused():
    overrides = ["--task.train_file=attacks.jsonl", "--objective.kind=mle_smoothing"]
    with pytest.raises(ConfigError, match=r"reward_threshold is 0.7, but rewards of red-teaming"):
        load_config(["redteam-gpt2"], overrides)
    low = load_config(["redteam-gpt2"], [*overrides, "--objective.reward_threshold=-0.36"])
    assert low.objective.reward_threshold == -0.36
