"""The recipes' pages: their commands are understood, and the paper's settings are what they say."""

import re
import shlex

import pytest

from tba.cli.app import split
from tba.config import Config
from tba.config.load import RECIPES, load_config, recipes
from tba.config.sft import load_sft_config
from tba.schedules import beta_at, learning_rate_at

LOADERS = {"train": load_config, "sft": load_sft_config}
OPTIONS = ["run-dir", "resume", "clean", "dry-run"]
FILES = ("--task.train_file=a", "--task.test_file=b", "--model.model_name_or_path=m")


def commands() -> list[str]:
    found = []
    for recipe in recipes():
        page = (RECIPES / recipe / "README.md").read_text()
        for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if re.match(r"tba (train|sft) ", line)]
    return found


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_recipes_page_is_understood(command):
    _, name, *words = shlex.split(command)
    if "--run-dir" in words:
        at = words.index("--run-dir")
        del words[at : at + 2]
    sources, overrides = split(words, OPTIONS)
    assert all(source.partition("/")[0] in recipes() for source in sources)
    assert LOADERS[name](sources, overrides).trainer.steps > 0


def paper(name: str, *variants: str) -> Config:
    needed = FILES[: 1 if name.startswith("redteam") else 2]
    return load_config([name, *(f"{name}/{variant}" for variant in variants)], needed)


def test_the_gsm8k_run_is_the_papers():
    config = paper("gsm8k-rho1b")
    steps, rates = config.trainer.steps, config.trainer.learning_rate_schedule
    assert (steps, config.trainer.queries_per_batch, config.trainer.samples_per_query) == (
        *(1000, 7),
        20,
    )
    assert (config.search.samples_per_query, config.search.temperature) == (24, 0.7)
    assert config.trainer.learning_rate == 1e-5
    factors = [learning_rate_at(rates, step, steps) for step in (24, 50, 499, 500, 750)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 0.5])
    betas = [beta_at(config.objective.beta, step, steps) for step in (0, 250, 500, 999)]
    assert betas == pytest.approx([0.012, 0.008, 0.004, 0.004])
    buffer = config.buffer
    assert (buffer.on_policy_prob, buffer.capacity_per_query, buffer.initial_samples) == (
        *(0.95, 100),
        500,
    )
    assert config.sync.sync_every == 2


def test_the_run_of_figure_1_is_a_longer_schedule_from_a_larger_beta():
    config = paper("gsm8k-rho1b", "figure-1")
    steps, rates = config.trainer.steps, config.trainer.learning_rate_schedule
    factors = [learning_rate_at(rates, step, steps) for step in (50, 399, 400, 700)]
    assert factors == pytest.approx([1, 1, 1, 0.5])  # 50 of warm-up, 350 stable, 600 of decay
    assert beta_at(config.objective.beta, 0, steps) == 0.014
    assert beta_at(config.objective.beta, 500, steps) == 0.004


@pytest.mark.parametrize("size", ["410m", "1b", "2.8b"])
def test_the_tldr_runs_are_the_papers(size):
    config = paper(f"tldr-pythia-{size}")
    trainer, buffer, steps = config.trainer, config.buffer, config.trainer.steps
    assert (steps, trainer.queries_per_batch, trainer.samples_per_query) == (256, 8, 20)
    assert (trainer.learning_rate, trainer.precision) == (3e-6, "float32")
    assert (config.search.samples_per_query, config.search.temperature) == (20, 0.7)
    betas = [beta_at(config.objective.beta, step, steps) for step in (0, 31, 32, 255)]
    assert betas == pytest.approx([1.0, 1 - 0.95 * 31 / 128, 0.05, 0.05])
    assert (buffer.on_policy_prob, buffer.initial_samples) == (0.5, 10_000)
    assert (buffer.capacity_per_query, config.sync.sync_every) == (100, 10)


@pytest.mark.parametrize(
    ("size", "variants", "m", "capacity"),
    [
        ("gpt2", (), 0.5, 100_000),
        ("llama", (), 0.5, 150_000),
        ("llama", ("diverse",), 0.6, 130_000),
    ],
)
def test_the_red_teaming_runs_are_the_papers(size, variants, m, capacity):
    config = paper(f"redteam-{size}", *variants)
    assert (config.trainer.steps, config.trainer.samples_per_query) == (5000, 128)
    assert config.trainer.learning_rate == 1e-4
    assert (config.model.lora.rank, config.model.lora.alpha) == (32, 16)
    assert config.objective.beta.value == 0.05
    assert (config.buffer.on_policy_prob, config.buffer.capacity_per_query) == (m, capacity)
    assert (config.task.min_length, config.search.max_completion_length) == (5, 20)
    assert config.task.victim_samples == 5
    assert config.sync.sync_every == 10
    assert config.buffer.given == "demonstrations"  # its initial samples
    assert (config.buffer.evict, config.buffer.off_policy_sampling) == ("oldest", "softmax_reward")
    assert config.trainer.learning_rate_schedule.warmup_steps == 100
    assert config.search.temperature_range == ((0.7, 2.0) if size == "llama" else None)


def test_the_math_run_is_the_papers():
    config = paper("math-qwen7b")
    trainer = config.trainer
    assert (trainer.steps, trainer.queries_per_batch, trainer.samples_per_query) == (400, 32, 16)
    assert (trainer.learning_rate, config.objective.beta.value) == (1e-6, 0.005)
    assert (config.sync.reference_reset_every, config.sync.sync_every) == (50, 2)
    assert paper("math-qwen7b", "async-10").sync.sync_every == 10


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("gsm8k-rho1b", ("grpo", "ppo", "rloo", "vineppo", "online-dpo", "dr-grpo")),
        ("tldr-pythia-410m", ("ppo", "rloo", "online-dpo")),
        ("math-qwen7b", ("dr-grpo",)),
    ],
)
def test_baselines_use_each_sample_once_and_search_no_more_than_they_need(recipe, names):
    for name in names:
        config = paper(recipe, name)
        buffer, search, trainer = config.buffer, config.search, config.trainer
        assert (buffer.on_policy_prob, buffer.max_reuse) == (1.0, 1), name
        assert search.samples_per_query == trainer.samples_per_query, name
        if config.sync.mode != "free":  # a round of one batch of each searcher
            round_of = search.searchers * search.queries_per_batch
            needed = trainer.queries_per_batch * config.sync.sync_every
            assert round_of * -(-needed // round_of) < needed + search.searchers, name
