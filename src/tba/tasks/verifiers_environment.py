"""The library verifiers: imports an environment, refuses what one turn cannot serve, and scores.

Version 0.4 of the library makes an environment of a task set, tasks with rewards, and agents. Here
the policy takes the place of its tool-less chat agent (its harness `null`) that answers once. So an
environment is refused that plays by rules of its own (an `Env` or harness in its package), offers
tools, asks a judge model, or whose tasks or rewards need the machine that an agent worked on.

Of `Scoring` only the scoring process makes one. It imports no torch.
"""

import asyncio
import inspect
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import ValidationError

from tba.errors import ConfigError
from tba.references import user_code
from tba.tasks.rewards import text_of

VERSION = "0.4"
"""The version of the library whose interface this was written for."""
INSTALL = "pip install -c constraints.txt -e '.[verifiers]'"
ACCEPTED = (
    "task.kind verifiers takes environments that are answered in one turn, without tools, a judge "
    "model or a sandbox"
)


def import_library() -> Any:
    """Return the module `verifiers.v1`.

    Raises:
        ConfigError: It is missing, or of another version.
    """
    try:
        found = version("verifiers")
        if found.split(".")[:2] != VERSION.split("."):
            raise ConfigError(
                f"task.kind is verifiers, but version {found} of the package verifiers is "
                f"installed, whose interface is not that of {VERSION}: {INSTALL}"
            )
        import verifiers.v1
    except (PackageNotFoundError, ModuleNotFoundError) as error:
        raise ConfigError(
            f"task.kind is verifiers, but the package {error.name} is not installed: {INSTALL}"
        ) from error
    return verifiers.v1


def import_environment(name: str) -> Any:
    """Import an environment's package, and return the library.

    Raises:
        ConfigError: The library or the package is missing, or exports no task set.
        UserCodeError: The package raises while it is imported.
    """
    vf = import_library()
    missing = None
    with user_code(f"environment {name} cannot be imported"):
        try:
            module = vf.import_taskset(name)
        except ModuleNotFoundError as error:
            missing = getattr(error.__cause__ or error, "name", None) or name
    if missing is not None:
        raise ConfigError(
            f"task.environment is {name!r}, but there is no module {missing}: install the "
            "environment's package where tba runs"
        )
    exported = [getattr(module, n, None) for n in getattr(module, "__all__", ())]
    if not any(isinstance(e, type) and issubclass(e, vf.Taskset) for e in exported):
        old = hasattr(module, "load_environment")
        why = (
            f"is written for verifiers before {VERSION} (load_environment)"
            if old
            else "exports no task set in __all__"
        )
        raise ConfigError(
            f"environment {name} {why}: use a version of it with a verifiers.v1.Taskset"
        )
    return vf


def make_config(vf: Any, name: str, setting: str, options: dict[str, Any]) -> Any:
    """Return the configuration of the environment's task set with the given options.

    Raises:
        ConfigError: The task set refuses an option; `setting` says where they were given.
        UserCodeError: The package exports more than one task set, or raises.
    """
    refused: ValidationError | None = None
    with user_code(f"the options of environment {name} cannot be read"):
        kind = vf.taskset_config_type(name)
        try:
            return kind.model_validate({**options, "id": name})
        except ValidationError as error:
            refused = error
    assert refused is not None
    first = refused.errors(include_url=False)[0]
    where = ".".join([setting, *map(str, first["loc"])])
    known = ", ".join(field for field in kind.model_fields if field != "id")
    raise ConfigError(
        f"environment {name} refuses {where} ({first['msg']}); its options are {known}"
    ) from refused


def check_environment(vf: Any, name: str, taskset: Any) -> None:
    """Check that the tasks of an environment can be answered in one turn.

    Raises:
        ConfigError: They cannot; the message says what they need.
        UserCodeError: The environment's code raises.
    """
    with user_code(f"environment {name} cannot be examined"):
        reason = next(_needs_of_environment(vf, name, taskset), None)
    _refuse(f"environment {name}", reason)


def check_rewards(name: str, task: Any) -> None:
    """Check that the rewards, which all tasks of an environment have in common, see the answer.

    Raises:
        ConfigError: There is none, or one reads the machine that an agent worked on.
        UserCodeError: The environment's code raises.
    """
    with user_code(f"the rewards of environment {name} cannot be had"):
        rewards = task.hooks("reward")
        runtimes = [(r.__name__, inspect.signature(r).parameters.get("runtime")) for r in rewards]
    reads = [n for n, p in runtimes if p is not None and p.default is p.empty]
    if reads:
        reason = f"has rewards that read the machine of an agent ({', '.join(reads)})"
        _refuse(f"environment {name}", reason)
    _refuse(f"environment {name}", None if rewards else "has no reward")


def check_task(vf: Any, name: str, task: Any) -> None:
    """Check that a task has a prompt of text messages and needs no sandbox.

    Raises:
        ConfigError: It has not, or is of another class than the task set says; the message tells.
    """
    declared = vf.task_type(name)
    if type(task) is not declared:
        raise ConfigError(
            f"task {task.data.idx} of environment {name} is a {type(task).__name__}, but its task "
            f"set declares {declared.__name__}: declare vf.Taskset[{type(task).__name__}, ...]"
        )
    _refuse(f"task {task.data.idx} of environment {name}", next(_needs_of_task(task), None))


def messages_of(vf: Any, data: Any) -> list[dict[str, Any]]:
    """Return the prompt as messages of `role` and `content`, the system prompt first."""
    prompt = data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    if data.system_prompt is not None:
        messages.insert(0, vf.SystemMessage(content=data.system_prompt))
    return [m.model_dump(exclude_none=True) | {"content": _text(m.content)} for m in messages]


def rebuild(task_class: Any, sent: dict[str, Any]) -> Any:
    """Return the task data that were sent as JSON values."""
    return task_class.data_type().model_validate(sent)


class Scoring:
    """The environment's rewards, as a reward function.

    Raises:
        ConfigError: The library or the environment is missing.
    """

    def __init__(self, environment: str, eos_ids: Sequence[int]) -> None:
        self._name = environment
        self._eos_ids = frozenset(eos_ids)
        self._vf = import_environment(environment)
        self._configs: dict[str, Any] = {}  # by options as JSON, in which a run has one or two

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        prompt_tokens: Sequence[int],
        task: Sequence[dict[str, Any]],
        task_options: Sequence[dict[str, Any]],
    ) -> list[dict[str, float]]:
        """Return for each response the weighted sum of its rewards, and each reward and metric."""
        tasks = list(map(self._task, task, task_options))
        rows = zip(tasks, prompts, completions, completion_ids, prompt_tokens, strict=True)
        return list(
            await asyncio.gather(*(self._score(t, self._trace(t, *row)) for t, *row in rows))
        )

    def _task(self, sent: dict[str, Any], options: dict[str, Any]) -> Any:
        kind = self._vf.task_type(self._name)
        known = json.dumps(options, sort_keys=True)
        if known not in self._configs:
            self._configs[known] = make_config(self._vf, self._name, "task.options", options)
        return kind(rebuild(kind, sent), self._configs[known].task)

    def _trace(
        self, task: Any, prompt: Any, completion: Any, ids: Sequence[int], prompt_tokens: int
    ) -> Any:
        """Write down what the library would have seen: the prompt, and one answer to it."""
        from verifiers.v1.state import state_cls

        vf = self._vf
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*given, {"role": "assistant", "content": text_of(completion)}]
        last = len(messages) - 1
        ended = len(ids) > 0 and ids[-1] in self._eos_ids
        trace = vf.Trace(
            task=vf.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[
                vf.MessageNode(parent=i - 1 if i else None, message=m, sampled=i == last)
                for i, m in enumerate(messages)
            ],
            calls=[
                vf.ModelCall(
                    node=last,
                    finish_reason="stop" if ended else "length",
                    usage=vf.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(ids)),
                )
            ],
        )
        trace.stop("agent_completed")
        trace.ok = True
        return trace

    async def _score(self, task: Any, trace: Any) -> dict[str, float]:
        await task.score(trace)
        absent = [name for name, reward in trace.rewards.items() if reward is None]
        if absent or not trace.rewards:
            raise RuntimeError(f"no value of the rewards {', '.join(absent) or '(none at all)'}")
        told = {f"reward/{name}": reward.score for name, reward in trace.rewards.items()}
        told |= {f"metric/{n}": float(v) for n, v in trace.metrics.items() if v is not None}
        return {"score": trace.reward} | told


def _refuse(what: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"{what} {reason}: {ACCEPTED}")


def _needs_of_environment(vf: Any, name: str, taskset: Any) -> Iterator[str]:
    """Say what the environment needs beyond one answer to a prompt, one reason after the other."""
    config, task_class = taskset.config, vf.task_type(name)
    rules = vf.environment_class(name)
    if rules is not vf.SingleAgentEnv:
        yield f"is played in turns or by agents of its own rules ({rules.__name__})"
    if vf.default_harness_id(name) == name:
        yield "brings an agent of its own (a harness)"
    tools = [*task_class.toolsets(config.task), *taskset.toolsets(config)]
    if tools:
        yield f"offers tools ({', '.join(type(tool).__name__ for tool in tools)})"
    judges = [where for where, value in _fields(config) if isinstance(value, vf.JudgeConfig)]
    if judges:
        yield f"asks a judge model ({', '.join(judges)})"
    if task_class.NEEDS_CONTAINER:
        yield "needs a container"
    changed = [n for n in ("setup", "finalize") if _is_own(task_class, vf.Task, n)]
    if changed:
        yield f"works on the machine of an agent ({', '.join(changed)})"
    if any(hasattr(f, "intercept") for _, f in inspect.getmembers(task_class, inspect.isfunction)):
        yield "rewrites messages on their way (intercept)"


def _needs_of_task(task: Any) -> Iterator[str]:
    data = task.data
    for field in ("image", "agent_user", "skills", "artifacts"):
        if getattr(data, field):
            yield f"needs a sandbox ({field})"
    if not data.prompt:
        yield "has no prompt, so that a user would have to speak first"
    for message in [] if isinstance(data.prompt, str) else data.prompt or []:
        if message.role == "tool" or getattr(message, "tool_calls", None):
            yield "has calls of tools in its prompt"
        if any(part.type != "text" for part in _parts(message.content)):
            yield "has images in its prompt"


def _is_own(cls: Any, base: Any, name: str) -> bool:
    return getattr(cls, name) is not getattr(base, name)


def _fields(value: Any, where: str = "task.options") -> Iterator[tuple[str, Any]]:
    """Walk over the fields of a configuration and all that is in them."""
    yield where, value
    if hasattr(type(value), "model_fields"):
        inner = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        inner = []
    for name, own in inner:
        yield from _fields(own, f"{where}.{name}")


def _parts(content: Any) -> Sequence[Any]:
    return content if isinstance(content, list) else []


def _text(content: Any) -> str:
    """Return the text of a message's content, its parts on lines of their own."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
