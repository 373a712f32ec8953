import tomllib
from pathlib import Path

import pytest

from tba.config import Config, InlineRuntimeConfig, LocalRuntimeConfig
from tba.config.load import RECIPES, dump_toml, load_config, recipes, variants
from tba.config.objectives import ConstantBeta, LinearBeta
from tba.config.toml import dumps
from tba.config.training import CosineRate
from tba.errors import ConfigError

GSM8K = ["--task.train_file=a.jsonl", "--task.test_file=b.jsonl", "--model.model_name_or_path=m"]


def arithmetic(*overrides: str) -> Config:
    return load_config(["arithmetic"], overrides)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads(name):
    raw = tomllib.loads((RECIPES / name / f"{name}.toml").read_text())
    files = {"gsm8k": 2, "math": 2, "preference": 2, "redteam": 1}
    needed = GSM8K[: files.get(raw["task"]["kind"], 0)]
    needed += [] if raw.get("model") else GSM8K[2:]
    assert load_config([name], needed).task.kind == raw["task"]["kind"]
    for variant in variants(name):
        assert load_config([name, f"{name}/{variant}"], needed) != load_config([name], needed)


def test_later_sources_win_and_leave_the_rest(tmp_path):
    first = write(tmp_path / "a.toml", "[trainer]\nsteps = 7\nlearning_rate = 0.5\n")
    second = write(tmp_path / "b.toml", "[trainer]\nsteps = 8\n")
    config = load_config(["arithmetic", first, second])
    assert (config.trainer.steps, config.trainer.learning_rate) == (8, 0.5)
    assert config.trainer.queries_per_batch == arithmetic().trainer.queries_per_batch


def test_overrides_win_over_every_source(tmp_path):
    file = write(tmp_path / "a.toml", "seed = 3\n[trainer]\nsteps = 7\n")
    config = load_config(["arithmetic", file], ["--trainer.steps", "9"])
    assert (config.seed, config.trainer.steps) == (3, 9)


def test_a_named_model_takes_the_place_of_a_recipes_own_and_of_its_warm_start(tmp_path):
    assert arithmetic().model.build is not None
    assert arithmetic().warm_start.steps > 0
    config = arithmetic("--model.model_name_or_path=m", "--model.gradient_checkpointing=true")
    assert (config.model.model_name_or_path, config.model.build) == ("m", None)
    assert config.model.gradient_checkpointing
    assert config.warm_start == Config.model_fields["warm_start"].default
    file = write(tmp_path / "a.toml", '[model]\nmodel_name_or_path = "m"\n')
    assert load_config(["arithmetic", file], ["--warm_start.steps=7"]).warm_start.steps == 7
    kept = arithmetic("--model.model_name_or_path=m", "--model.build=none")
    assert kept.warm_start == arithmetic().warm_start, "what is unset by name is all that is"


def test_a_whole_configuration_is_a_source():
    assert load_config([arithmetic("--seed=5")], ["--trainer.steps=3"]) == arithmetic(
        "--seed=5", "--trainer.steps=3"
    )


def test_a_table_of_another_kind_starts_afresh():
    config = arithmetic("--objective.beta", '{kind = "linear", start = 0.1, end = 0.01}')
    assert config.objective.beta == LinearBeta(start=0.1, end=0.01)
    assert (
        load_config([config], ["--objective.beta.kind=constant"]).objective.beta == ConstantBeta()
    )


def test_the_order_of_kind_and_its_settings_does_not_matter():
    config = arithmetic(
        "--objective.beta.start=0.1", "--objective.beta.kind=linear", "--objective.beta.end=0.01"
    )
    assert config.objective.beta == LinearBeta(start=0.1, end=0.01)


def test_a_table_of_the_same_kind_is_merged(tmp_path):
    cosine = '[trainer.learning_rate_schedule]\nkind = "cosine"\n'
    first = write(tmp_path / "a.toml", cosine + "warmup_steps = 5\n")
    second = write(tmp_path / "b.toml", cosine + "final_share = 0.1\n")
    schedule = load_config(["arithmetic", first, second]).trainer.learning_rate_schedule
    assert schedule == CosineRate(warmup_steps=5, final_share=0.1)


def test_settings_of_the_default_kind_stand_alone():
    assert arithmetic("--runtime.max_restarts=2").runtime == LocalRuntimeConfig(max_restarts=2)


def test_a_default_kind_with_settings_gives_way_to_another_kind(tmp_path):
    file = write(tmp_path / "a.toml", "[runtime]\nmax_restarts = 2\n")
    runtime = load_config(["arithmetic", file], ["--runtime.kind=inline"]).runtime
    assert runtime == InlineRuntimeConfig()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("--trainer.learning_rate=1e-4", 1e-4),
        ("--trainer.learning_rate=1", 1.0),
        ("--trainer.max-grad-norm=0.5", 0.5),
        ("--trainer.max_grad_norm=.5", 0.5),
        ("--trainer.learning_rate=1.e-4", 1e-4),
        ("--task.pass_threshold=-.5", -0.5),
        ("--task.answer_prefix=.5", ".5"),
        ('--task.operators=["+", "-"]', ("+", "-")),
        ("--task.left=[0, 5]", (0, 5)),
        ("--sync.mode=barrier", "barrier"),
        ("--model.trust_remote_code=true", True),
        ("--task.answer_prefix=1+1", "1+1"),
        ("--task.answer_prefix=12", "12"),
        ("--task.answer_prefix=none", "none"),
        ('--task.answer_prefix="a = b"', "a = b"),
        ("--task.system_prompt=none", None),
        ("--model.build=none", None),
    ],
)
def test_values_are_toml_literals_or_text(override, value):
    extra = ["--task.train_queries=10", "--task.test_queries=5"]
    if "model" not in override or "model.build" in override:
        extra += ["--model.build=none", "--model.model_name_or_path=m"]
    found: object = arithmetic(override, *extra)
    for part in override.removeprefix("--").partition("=")[0].replace("-", "_").split("."):
        found = getattr(found, part)
    assert found == value


def test_value_may_follow_as_a_word_of_its_own_and_be_negative():
    assert arithmetic("--task.pass_threshold", "-1", "--seed", "4").task.pass_threshold == -1.0


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--objective.beta", '{kind = "linear", start = 1, end = 0.5}'),
        ("--runtime.kind=inline", "--buffer.max_staleness=9"),
        ('--task.system_prompt="tab\\t quote\\" backslash\\\\ \\u007f é"',),
    ],
)
def test_dumped_configuration_loads_as_the_same(tmp_path, overrides):
    config = arithmetic(*overrides)
    assert load_config([write(tmp_path / "config.toml", dump_toml(config))]) == config


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_written_out_in_full(elsewhere):
    write(elsewhere / "a.toml", '[task]\ntrain_file = "x/train.jsonl"\n')
    task = load_config(["gsm8k-rho1b", "a.toml"], GSM8K[1:]).task
    assert task.model_dump()["train_file"] == elsewhere / "x/train.jsonl"
    assert task.model_dump()["test_file"] == elsewhere / "b.jsonl"


def test_files_of_a_task_of_ones_own_are_written_out_in_full(elsewhere):
    custom = ["--task.kind=custom", "--task.file=t.py", "--model.model_name_or_path=m"]
    rewards = '--task.reward=["r.py:f", "exact_match", "package.module:g"]'
    task = load_config([write(elsewhere / "a.toml", "")], [*custom, rewards]).task.model_dump()
    assert task["file"] == elsewhere / "t.py"
    assert task["reward"] == (f"{elsewhere}/r.py:f", "exact_match", "package.module:g")


def test_a_model_folder_is_written_out_in_full_and_a_hub_name_is_not(elsewhere):
    (elsewhere / "m").mkdir()
    assert load_config(["gsm8k-rho1b"], GSM8K).model.model_name_or_path == f"{elsewhere}/m"
    hub = [*GSM8K[:2], "--model.model_name_or_path=owner/m"]
    assert load_config(["gsm8k-rho1b"], hub).model.model_name_or_path == "owner/m"


def test_home_is_written_out_and_full_paths_stay(elsewhere, monkeypatch):
    monkeypatch.setenv("HOME", str(elsewhere))
    files = ["--task.train_file=~/a.jsonl", "--task.test_file=/b.jsonl", GSM8K[2]]
    task = load_config(["gsm8k-rho1b"], files).task.model_dump()
    assert (task["train_file"], task["test_file"]) == (elsewhere / "a.jsonl", Path("/b.jsonl"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[trainer]\nsteps = \n", ["bad.toml is not valid TOML", "line 2"]),
        (b"\xff\xfe", ["not valid TOML", "utf-8"]),
        (b"task = 3\n", ["task is 3", "expected a table, as for task.kind"]),
        (b"[trainer]\nsteps = '10'\n", ['trainer.steps is "10"', "expected integer > 0"]),
        (b"", ["task.kind is missing"]),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, words):
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config([str(file)])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("arithmetik", ["no recipe arithmetik", "did you mean arithmetic?", "gsm8k-rho1b"]),
        ("zzz", ["no recipe zzz", "arithmetic, gsm8k-rho1b"]),
        ("gsm8k-rho1b/vinepo", ["has no variant vinepo", "did you mean vineppo?", "dr-grpo"]),
        ("arithmetic/x", ["recipe arithmetic has no variant x: it has none"]),
        ("nowhere/a.toml", ["nowhere/a.toml does not exist"]),
        ("b.toml", ["b.toml does not exist"]),
        ("./", ["cannot be read"]),
    ],
)
def test_an_unknown_source_is_named(source, words):
    with pytest.raises(ConfigError) as caught:
        load_config([source])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("kind", ["tb", "rloo", "online_dpo", "a_star_po"])
def test_a_number_stands_for_a_constant_beta(kind):
    config = arithmetic(f"--objective.kind={kind}", "--objective.beta=0.2")
    assert config.objective.beta == ConstantBeta(value=0.2)
    assert arithmetic("--objective.kind=grpo", "--objective.beta=0.2").objective.beta == 0.2


def test_keys_that_are_no_identifiers_are_quoted():
    tree = {"a b": {"x.y": 1, "z": [{"p q": "r"}]}, "plain-key": 2}
    assert tomllib.loads(dumps(tree)) == tree


@pytest.mark.parametrize("name", ["limit", "limit.sub.a"])
def test_options_that_toml_cannot_say_are_refused(name):
    words = ["--task.kind=gym", "--task.dataset=chain_sum", f"--task.options.{name}=none"]
    with pytest.raises(ConfigError, match=f"task.options.{name} is none, which TOML cannot say"):
        load_config(["arithmetic"], words)
