"""Environments of verifiers 0.4: real task sets in modules of their own, and what is refused."""

import importlib.metadata
import pickle
import sys

import numpy as np
import pytest
from pydantic import TypeAdapter

from tba.config import TaskConfig
from tba.config.load import load_config
from tba.errors import ConfigError, ModelError, UserCodeError
from tba.records import Outcome
from tba.tasks import Scorer, load_task
from tba.tasks import verifiers_environment as environments

SUMS = """
import asyncio, time
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "hang":
            time.sleep(60)
        if trace.last_reply == "raise":
            raise KeyError("no such sum")
        await asyncio.sleep(0)
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=-0.5)
    async def cut_off(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)

    @vf.metric
    async def seen(self, trace: vf.Trace) -> dict:
        roles = [m.role for m in trace.messages]
        assert roles == ["system", "user", "assistant"] and trace.num_turns == 1
        return {"new_tokens": trace.num_output_tokens, "old_tokens": trace.num_input_tokens}

class SumConfig(vf.TasksetConfig):
    split: str = "train"
    size: int = 40

class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        step = 2 if self.config.split == "test" else 1
        for i in range(0, self.config.size, step):
            yield SumTask(SumData(prompt=f"{i}+1=", system_prompt="Add.", answer=str(i + 1)))

__all__ = ["SumTaskset"]
"""


def config(name="tba_sums", **settings):
    small = {"kind": "verifiers", "environment": name, "test_queries": 10}
    return TypeAdapter(TaskConfig).validate_python(small | settings)


def contents(queries):
    return [query.columns["task"]["prompt"] for query in queries]


# What follows needs no library.


def test_its_options_are_settings_like_any_other(tmp_path):
    recipe = tmp_path / "sums.toml"
    recipe.write_text('[task]\nkind = "verifiers"\nenvironment = "sums"\noptions = { size = 9 }\n')
    overrides = ["--task.test_options.split", "test", "--model.model_name_or_path", "m"]
    task = load_config([str(recipe)], overrides).task
    assert (task.options, task.test_options) == ({"size": 9}, {"split": "test"})
    assert task.chat
    assert task.train_queries is None


def test_a_missing_library_names_the_extra(tokenizer, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environments, "version", missing)
    with pytest.raises(
        ConfigError, match=r"package verifiers is not installed: pip.*\[verifiers\]"
    ):
        load_task(config(), tokenizer)


def test_a_part_of_the_library_that_is_missing_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(environments, "version", lambda name: "0.4.7")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(
        ConfigError, match=r"the package verifiers\S* is not installed: pip install"
    ):
        load_task(config(), tokenizer)


@pytest.mark.parametrize("other", ["0.1.14", "0.5.0", "1.0"])
def test_another_version_of_the_library_is_refused(tokenizer, monkeypatch, other):
    monkeypatch.setattr(environments, "version", lambda name: other)
    with pytest.raises(ConfigError, match=f"version {other} .* is not that of 0.4: pip install"):
        load_task(config(), tokenizer)


# What follows runs the library itself.


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Make a module of the given source that lives as long as the test, and return its name."""
    pytest.importorskip("verifiers.v1", reason="the extra verifiers is not installed")
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source, name="tba_sums"):
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def score(task, texts, ids=((5, 1),)):
    query = pickle.loads(pickle.dumps(task.train[0]))
    tokens = [np.asarray(own, np.int32) for own in ids] * (len(texts) // len(ids))
    with Scorer(task.reward) as scorer:
        return scorer.score([query] * len(texts), texts, tokens)


def test_tasks_are_chat_prompts_and_no_held_out_one_is_trained_on(environment, chat_tokenizer):
    environment(SUMS)
    task, again = (load_task(config(), chat_tokenizer) for _ in range(2))
    train, test = contents(task.train), contents(task.test)
    assert (len(train), len(test)) == (30, 10)
    assert sorted(train + test) == sorted(f"{i}+1=" for i in range(40))
    assert contents(again.train) == train
    assert contents(load_task(config(split_seed=1), chat_tokenizer).train) != train
    assert task.train[0].prompt == f"<s>[system]Add.[user]{train[0]}[assistant]"
    own = load_task(config(system_prompt="Sum."), chat_tokenizer).train[0]
    assert own.prompt == f"<s>[system]Sum.[user]{train[0]}[assistant]"
    assert own.columns["task"]["system_prompt"] == "Sum."


def test_a_split_of_its_own_is_held_out_and_not_trained_on(environment, chat_tokenizer):
    environment(SUMS)
    settings = config(options={"size": 20}, test_options={"split": "test"}, train_queries=7)
    task = load_task(settings, chat_tokenizer)
    assert set(contents(task.test)) == {f"{i}+1=" for i in range(0, 20, 2)}
    assert set(contents(task.train)) < {f"{i}+1=" for i in range(1, 20, 2)}
    assert len(task.train) == 7


def test_its_rewards_are_weighed_and_told_in_the_scoring_process(environment, chat_tokenizer):
    environment(SUMS)
    task = load_task(config(), chat_tokenizer)
    answer = task.train[0].columns["task"]["answer"]
    # With eos = 1, the ids 5, 1 have ended and 5, 6, 7 have not; 2 x right - .5 x cut off.
    scores = score(task, [answer, f" {answer}\n", "x", answer], ids=[(5, 1), (5, 6, 7)])
    assert [s.reward for s in scores] == [2.0, 1.5, 0.0, 1.5]
    told = {name: float(v[0]) for name, v in scores[1].extras.items()}
    assert told == {
        "reward/right": 1.0,
        "reward/cut_off": 1.0,
        "metric/new_tokens": 3.0,
        "metric/old_tokens": len(task.train[0].prompt_ids),
    }


def test_a_reward_that_raises_or_hangs_is_a_failure_and_no_zero(environment, chat_tokenizer):
    environment(SUMS)
    task = load_task(config(reward_timeout_s=1.0), chat_tokenizer)
    answer = task.train[0].columns["task"]["answer"]
    scores = score(task, [answer, "raise", "hang", "x"])
    outcomes = [Outcome.OK, Outcome.ERROR, Outcome.TIMEOUT, Outcome.OK]
    assert [s.outcome for s in scores] == outcomes
    assert "KeyError: 'no such sum'" in scores[1].detail
    assert (scores[0].reward, scores[3].reward) == (2.0, 0.0)


def test_without_chat_a_single_user_message_is_plain_text(environment, tokenizer):
    environment(SUMS.replace('system_prompt="Add.", ', "").replace('"system", ', ""))
    task = load_task(config(chat=False), tokenizer)
    assert task.train[0].prompt == contents(task.train)[0]
    answer = task.train[0].columns["task"]["answer"]
    assert score(task, [answer])[0].reward == 2.0
    with pytest.raises(ConfigError, match=r"has the roles system, user: set task.chat to true"):
        load_task(config(chat=False, system_prompt="Add."), tokenizer)
    with pytest.raises(ModelError, match="has no chat template"):
        load_task(config(), tokenizer)


def test_prompts_of_several_messages_are_kept_as_they_are(environment, chat_tokenizer):
    messages = (
        "[vf.UserMessage(content=f'{i}+0='), vf.AssistantMessage(content=str(i)),"
        " vf.UserMessage(content=[vf.TextContentPart(text=f'{i}+1=')])]"
    )
    source = SUMS.replace('f"{i}+1="', messages)
    environment(
        source.replace('["system", "user", "assistant"]', '["system"] + ["user", "assistant"] * 2')
    )
    task = load_task(config(train_queries=3), chat_tokenizer)
    answer = task.train[0].columns["task"]["answer"]
    before = int(answer) - 1
    assert task.train[0].prompt == (
        f"<s>[system]Add.[user]{before}+0=[assistant]{before}[user]{before}+1=[assistant]"
    )
    assert score(task, [answer])[0].reward == 2.0


def test_tasks_without_end_need_a_number(environment, chat_tokenizer):
    endless = SUMS.replace("def load", "INFINITE = True\n    def load").replace(
        "range(0, self.config.size, step)", "__import__('itertools').count()"
    )
    environment(endless)
    with pytest.raises(ConfigError, match=r"makes tasks without end: set task.train_queries"):
        load_task(config(), chat_tokenizer)
    task = load_task(config(train_queries=25), chat_tokenizer)
    assert (len(task.train), len(task.test)) == (25, 10)


OWN_ENV = """
class OwnConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
class Own(vf.Env[OwnConfig]):
    async def run(self, task, agents):
        await agents.player.run(task)
__all__.append("Own")
"""
OWN_HARNESS = """
class Own(vf.Harness[vf.HarnessConfig]):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        raise NotImplementedError
__all__.append("Own")
"""
METHOD = "    @vf.metric\n"


def with_method(source):
    return SUMS.replace(METHOD, f"{source}\n{METHOD}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (SUMS + OWN_ENV, r"is played in turns or by agents of its own rules \(Own\)"),
        (SUMS + OWN_HARNESS, "brings an agent of its own"),
        (
            with_method(
                "    @classmethod\n    def toolsets(cls, config):\n"
                "        return [vf.Toolset(vf.ToolsetConfig())]"
            ),
            r"offers tools \(Toolset\)",
        ),
        (
            SUMS.replace(
                "    size: int", "    judge: vf.JudgeConfig = vf.JudgeConfig()\n    size: int"
            ),
            r"asks a judge model \(task.options.judge\)",
        ),
        (with_method("    NEEDS_CONTAINER = True"), "needs a container"),
        (with_method("    async def setup(self, trace, runtime): ..."), r"machine .* \(setup\)"),
        (
            with_method("    @vf.intercept\n    def shout(self, request: vf.Request): ..."),
            "rewrites messages",
        ),
        (
            with_method("    @vf.reward\n    async def tests(self, runtime) -> float: return 1.0"),
            r"rewards that read the machine of an agent \(tests\)",
        ),
        (
            SUMS.replace("@vf.reward(weight=2.0)", "").replace("@vf.reward(weight=-0.5)", ""),
            "no reward",
        ),
        (SUMS.replace('prompt=f"{i}+1=", ', ""), "task [0-9]+ .* has no prompt, so that a user"),
        (
            SUMS.replace("answer=str", 'image="python:3.12", answer=str'),
            r"needs a sandbox \(image\)",
        ),
        (
            SUMS.replace(
                'f"{i}+1="',
                "[vf.UserMessage(content=[vf.ImageUrlContentPart(image_url={'url': 'data:,'})])]",
            ),
            "has images in its prompt",
        ),
        (
            SUMS.replace('f"{i}+1="', "[vf.ToolMessage(tool_call_id='1', content='x')]"),
            "has calls of tools in its prompt",
        ),
    ],
)
def test_what_one_turn_cannot_serve_is_refused(environment, chat_tokenizer, source, reason):
    environment(source)
    with pytest.raises(ConfigError, match=f"{reason}.*: task.kind verifiers takes .* in one turn"):
        load_task(config(), chat_tokenizer)


@pytest.mark.parametrize(
    ("source", "settings", "error", "message"),
    [
        (SUMS, {"environment": "tba_none"}, ConfigError, "no module tba_none: install"),
        ("import tba_nowhere", {}, ConfigError, "no module tba_nowhere: install"),
        ("1 / 0", {}, UserCodeError, "cannot be imported: ZeroDivisionError"),
        ("def load_environment(): ...", {}, ConfigError, "is written for verifiers before 0.4"),
        ("__all__ = []", {}, ConfigError, "exports no task set in __all__"),
        (
            SUMS,
            {"options": {"sise": 3}},
            ConfigError,
            r"refuses task.options.sise \(Extra .*\); its options are .*, split, size",
        ),
        (
            SUMS,
            {"test_options": {"size": "x"}},
            ConfigError,
            r"refuses task.test_options.size \(Input should be a valid integer",
        ),
        (SUMS, {"options": {"size": 10}}, ConfigError, "has 10 tasks, but task.test_queries is 10"),
        (
            SUMS,
            {"test_options": {}, "test_queries": 99},
            ConfigError,
            "has 40 tasks to hold out and 0 with other",
        ),
        (
            SUMS.replace("vf.Taskset[SumTask, SumConfig]", "vf.Taskset[vf.Task, SumConfig]"),
            {},
            ConfigError,
            r"is a SumTask, but its task set declares Task: declare vf.Taskset\[SumTask",
        ),
        (SUMS.replace("range(0,", "range(1 // 0,"), {}, UserCodeError, "loaded: ZeroDivisionError"),
        (
            SUMS.replace("answer: str", "answer: str\n    secret: object = vf").replace(
                "answer=str", "secret=object(), answer=str"
            ),
            {},
            ConfigError,
            "the data of task [0-9]+ of environment tba_sums cannot be written as JSON",
        ),
    ],
)
def test_what_cannot_be_loaded_is_told(
    environment, chat_tokenizer, source, settings, error, message
):
    environment(source)
    with pytest.raises(error, match=message):
        load_task(config(**settings), chat_tokenizer)
