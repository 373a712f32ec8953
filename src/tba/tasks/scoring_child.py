"""The scoring process: imports reward functions, calls them and checks what they return.

`tba.tasks.scoring` starts it, and kills it when a call takes too long. It imports no torch. The
first message it gets is a `RewardSpec`, every other one a `Request`; it answers each with a
`Reply`.
"""

import asyncio
import inspect
import numbers
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from tba.errors import UserCodeError, UserError
from tba.records import Float32, Int32
from tba.references import describe, load_function
from tba.tasks.base import RewardSpec
from tba.tasks.rewards import text_of

LARGEST_REWARD = float(np.finfo(np.float32).max)
GRACE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """Responses to score; the lists are aligned."""

    prompts: list[Any]
    """What the user's rows held: strings or message lists."""
    texts: list[str]
    """Decoded responses."""
    tokens: list[Int32] | None
    """Their tokens; None of texts that the policy did not sample."""
    columns: dict[str, list[Any]]
    """The rows' other columns, by name."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The functions returned."""

    values: list[float | None]
    """One weighted sum for each response; None where no function applies."""
    extras: list[dict[str, Float32]]
    """What the functions told of each response besides, by name; each of shape [number]."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A function raised."""

    detail: str
    """Type and message."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A function cannot be loaded or broke its contract."""

    message: str
    """One sentence for the user."""


Reply = Rewards | Raised | Refused


@dataclass(frozen=True, slots=True)
class Graded:
    """What one function says of one response."""

    reward: float | None
    """Its reward, without the function's weight; None where the function does not apply."""
    extras: Mapping[str, Float32]
    """What it tells besides."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function and its weight."""

    called: str
    """How messages call it (`RewardSpec.called`)."""
    function: Callable[..., Any]
    """The function itself."""
    weight: float
    """Its weight in the sum."""

    def __call__(self, arguments: Mapping[str, Any]) -> list[Graded]:
        """Call the function with those of the arguments that it accepts, and check its rewards.

        Raises:
            UserCodeError: It needs a parameter that is not there, or did not return a list with one
                finite number, None or dict with `score` for each response.
        """
        expected = len(arguments["completions"])
        own = {name: list(v) if isinstance(v, list) else v for name, v in arguments.items()}
        rewards = self.function(**self._accepted(own))
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_wait_for(rewards))
        if not isinstance(rewards, list):
            raise self._breach(f"returned a {type(rewards).__name__}", "a list of numbers")
        if len(rewards) != expected:
            raise self._breach(
                f"returned {len(rewards)} rewards", f"{expected}, one for each response"
            )
        return [self._graded(value) for value in rewards]

    def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            accepted = dict(arguments)
        else:
            accepted = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
        for p in parameters:
            wanted = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            if wanted and p.name not in accepted:
                raise UserCodeError(
                    f"{self.called} needs a parameter {p.name!r}, but there is "
                    f"{', '.join(sorted(arguments))}: name a column or give a default"
                )
        return accepted

    def _graded(self, value: Any) -> Graded:
        """Read one reward; of a dict `score` is the reward and the rest numbers told besides."""
        if not isinstance(value, Mapping):
            return Graded(self._checked(value), {})
        if "score" not in value:
            raise self._breach(f"returned a dict without score ({', '.join(value)})", "score in it")
        told = {name: own for name, own in value.items() if name != "score"}
        try:
            extras = {name: np.atleast_1d(np.asarray(v, np.float32)) for name, v in told.items()}
        except (TypeError, ValueError) as error:
            raise self._breach(
                f"told {told!r:.80} besides score", "numbers or lists of them"
            ) from error
        if any(v.ndim > 1 for v in extras.values()):
            raise self._breach(f"told {told!r:.80} besides score", "numbers or lists of them")
        return Graded(self._checked(value["score"]), extras)

    def _checked(self, value: Any) -> float | None:
        if value is None:
            return None
        if not isinstance(value, numbers.Real | np.bool_):
            raise self._breach(f"returned {value!r:.80}", "a number or None for each response")
        reward = float(value)
        if not abs(reward) <= LARGEST_REWARD:  # NaN compares false
            raise self._breach(f"returned {value!r:.80}", "a finite number")
        return reward

    def _breach(self, what: str, expected: str) -> UserCodeError:
        return UserCodeError(f"{self.called} {what}, expected {expected}")


def load(spec: RewardSpec) -> list[RewardFunction]:
    """Import every function of the spec, and make those that have options."""
    options = spec.options or ({},) * len(spec.functions)
    return [
        RewardFunction(spec.called(name), _in_trl_form(_made(load_function(name), own)), weight)
        for name, weight, own in zip(spec.functions, spec.weights, options, strict=True)
    ]


def _made(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        return function(**options) if options else function
    except UserError as error:  # of a model, say: a sentence already
        raise UserCodeError(str(error)) from error


def evaluate(functions: Sequence[RewardFunction], request: Request, spec: RewardSpec) -> Rewards:
    """Return the weighted sum of all functions for each response, leaving None out of it.

    A response that the policy did not end gets the penalty instead, where there is one.
    """
    arguments = request.columns | {
        "prompts": request.prompts,
        "completions": [
            _completion(p, t) for p, t in zip(request.prompts, request.texts, strict=True)
        ],
    }
    if request.tokens is not None:
        arguments["completion_ids"] = [tokens.tolist() for tokens in request.tokens]
    columns = [[(_weigh(g.reward, f.weight), g.extras) for g in f(arguments)] for f in functions]
    rows = list(zip(*columns, strict=True))  # [function, response] -> [response, function]
    totals = [_total([reward for reward, _ in row]) for row in rows]
    if request.tokens is not None:
        totals = [_penalised(*one, spec) for one in zip(totals, request.tokens, strict=True)]
    return Rewards(
        values=totals,
        extras=[{k: v for _, extras in row for k, v in extras.items()} for row in rows],
    )


def main(fd: int, parent: int) -> None:
    """Answer messages on file descriptor `fd` until the other end is closed.

    Args:
        fd: One end of a pipe.
        parent: Process id of the parent, told by itself: asked here, it may be gone already.
    """
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    os.register_at_fork(after_in_child=pipe.close)  # a forked child must not keep the pipe open
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        spec = pipe.recv()
        functions = _guarded(lambda: load(spec))
        if not isinstance(functions, list):
            pipe.send(functions)
            return
        pipe.send(Rewards([], []))
        _serve(pipe, functions, spec)


def _serve(pipe: Connection, functions: Sequence[RewardFunction], spec: RewardSpec) -> None:
    while True:
        work = partial(evaluate, functions, pipe.recv(), spec)
        # Should the parent die while a function holds the interpreter lock, the kernel ends us.
        signal.setitimer(signal.ITIMER_REAL, spec.timeout_s + GRACE_S)
        reply = _guarded(work)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send(reply)


def _guarded(work: Callable[[], T]) -> T | Raised | Refused:
    """Run the user's code: the boundary beyond which nothing that it raises gets."""
    try:
        return work()
    except UserCodeError as error:
        return Refused(str(error))
    except BaseException as error:
        return Raised(describe(error))


def end_with(parent: int) -> None:
    """End this process, whatever it is doing, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _in_trl_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It is called for one response at a time; of a dict that it returns, `score` is the reward.
    """
    if not {"solution_str", "ground_truth"} <= inspect.signature(function).parameters.keys():
        return function

    def reward(
        completions: list[Any],
        ground_truth: list[Any],
        data_source: list[Any] | None = None,
        extra_info: list[Any] | None = None,
    ) -> list[Any]:
        absent = [None] * len(completions)
        rows = zip(
            data_source or absent, completions, ground_truth, extra_info or absent, strict=True
        )
        results = [
            function(data_source=d, solution_str=text_of(c), ground_truth=g, extra_info=e)
            for d, c, g, e in rows
        ]
        return [result["score"] if isinstance(result, dict) else result for result in results]

    return reward


def _completion(prompt: Any, text: str) -> Any:
    """Return the response in the form of its prompt: a string or a list of one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _weigh(reward: float | None, weight: float) -> float | None:
    return None if reward is None else weight * reward


def _total(values: Sequence[float | None]) -> float | None:
    applicable = [v for v in values if v is not None]
    return sum(applicable) if applicable else None


def _penalised(total: float | None, tokens: Int32, spec: RewardSpec) -> float | None:
    if spec.missing_eos_penalty is None or total is None:
        return total
    ended = len(tokens) > 0 and int(tokens[-1]) in spec.eos_ids
    return total if ended else spec.missing_eos_penalty


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable
