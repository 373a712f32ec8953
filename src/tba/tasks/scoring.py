"""Scores responses in a process that can be killed, so that no reward function can stop a run.

Reward functions are the user's code: they raise, hang, leak and crash. They run in one child
process that is killed and replaced when it overruns; each response gets a typed `Score`, and a
failure is never a zero.

A batch is tried as a whole first, for `timeout_s`. When that fails, its responses are tried one
at a time, so that only the culprit is marked. `score` therefore returns after at most `(1 + n) *
timeout_s` for n responses, plus the start of a new child for each one that died (0.5 s as a rule,
`start_timeout_s` at most). After `MAX_LOST` responses of a batch that hung, or with which the child
died, the rest is marked untried: a function that always hangs costs `(1 + MAX_LOST) * timeout_s` a
batch, and one that always dies as many starts.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

from tba.errors import UserCodeError
from tba.records import Float32, Int32, Outcome, Query, Score
from tba.tasks.base import RewardSpec
from tba.tasks.scoring_child import Raised, Refused, Reply, Request, Rewards

END_TIMEOUT_S = 60.0
MAX_LOST = 8


@dataclass(frozen=True, slots=True)
class _Lost:
    """The child is gone without an answer."""

    outcome: Outcome
    """TIMEOUT when it was killed for overrunning, ERROR when it died by itself."""
    detail: str
    """What happened."""


class Scorer:
    """A scoring process, from `__enter__` to `__exit__`.

    Entering starts the process and imports the functions there. `score` blocks, within the bound
    that the module states, and calls `announce` before each attempt. Not to be shared by threads.

    Raises:
        UserCodeError: On entering, there is no function or one cannot be imported; in `score`,
            one broke its contract.
    """

    def __init__(self, spec: RewardSpec, announce: Callable[[], None] = lambda: None) -> None:
        self._spec = spec
        self._announce = announce
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        if not self._spec.functions:
            raise UserCodeError(
                "the task has no reward function, so no response can be scored: name one in "
                "task.reward, or define reward(completions, **columns) in the task's Python file"
            )
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def score(
        self, queries: Sequence[Query], texts: Sequence[str], tokens: Sequence[Int32] | None
    ) -> list[Score]:
        """Score each text as a response to the query at the same position.

        Args:
            queries: What was asked.
            texts: The responses.
            tokens: Theirs; None where the policy did not sample them, so that nothing is known of
                their ends, and a function that needs `completion_ids` is refused.
        """
        if not texts:
            return []
        reply = self._call(_request(queries, texts, tokens))
        if isinstance(reply, Rewards):
            return list(map(_score, reply.values, reply.extras))
        if len(texts) == 1:
            return [_failure(reply)]
        scores: list[Score] = []
        lost: list[Outcome] = []
        for i, (query, text) in enumerate(zip(queries, texts, strict=True)):
            if len(lost) == MAX_LOST:
                how = "hung" if lost[-1] is Outcome.TIMEOUT else "ended the scoring process"
                scores.append(
                    _failed(lost[-1], f"not tried: {len(lost)} responses before it {how}")
                )
                continue
            scores.extend(self.score([query], [text], None if tokens is None else [tokens[i]]))
            if self._child is None:
                lost.append(scores[-1].outcome)
        return scores

    def _call(self, request: Request) -> Rewards | Raised | _Lost:
        if self._child is None:
            self._announce()
            self._start()
        self._announce()
        reply = self._ask(request, self._spec.timeout_s)
        if isinstance(reply, Refused):
            raise UserCodeError(reply.message)
        return reply

    def _start(self) -> None:
        ours, theirs = Pipe()
        path = [entry or os.getcwd() for entry in sys.path] + [os.getcwd()]
        with theirs:
            # Not multiprocessing: that runs the main module again, and daemonic processes may not.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN.format(fd=theirs.fileno(), parent=os.getpid())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to our standard error
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._pipe = ours
        reply = self._ask(self._spec, self._spec.start_timeout_s)
        if not isinstance(reply, Rewards):
            self._stop()
            reason = reply.message if isinstance(reply, Refused) else reply.detail
            names = self._spec.setting or f"reward functions {', '.join(self._spec.functions)}"
            raise UserCodeError(f"{names} cannot be used: {reason}")

    def _ask(self, message: RewardSpec | Request, timeout_s: float) -> Reply | _Lost:
        """Send a message and wait for the answer; kill a child that does not answer in time."""
        assert self._child is not None
        assert self._pipe is not None
        reply: Reply | None = None
        overran = threading.Event()
        timer = threading.Timer(timeout_s, _kill, (self._child, overran))
        timer.start()
        try:
            self._pipe.send(message)
            reply = self._pipe.recv()
        except (EOFError, OSError):
            timer.cancel()
            timer.join()
            if overran.is_set():
                return _Lost(Outcome.TIMEOUT, f"no reward within {timeout_s:g} s")
            return _Lost(Outcome.ERROR, f"the scoring process ended with {self._last_words()}")
        finally:
            timer.cancel()
            timer.join()
            if reply is None or overran.is_set():
                self._stop()
        return reply

    def _last_words(self) -> str:
        assert self._child is not None
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its pipe closed"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _stop(self) -> None:
        if self._child is not None:
            _kill(self._child)
            self._child.wait(timeout=END_TIMEOUT_S)
        if self._pipe is not None:
            self._pipe.close()
        self._child = self._pipe = None


_MAIN = "from tba.tasks.scoring_child import main; main({fd}, parent={parent})"


def _kill(child: subprocess.Popen[bytes], overran: threading.Event | None = None) -> None:
    """Kill the child with everything it has started."""
    if overran is not None:
        overran.set()
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was gone already


def _request(
    queries: Sequence[Query], texts: Sequence[str], tokens: Sequence[Int32] | None
) -> Request:
    names = dict.fromkeys(name for q in queries for name in q.columns if name != "prompt")
    columns: dict[str, list[Any]] = {name: [q.columns.get(name) for q in queries] for name in names}
    prompts = [q.columns.get("prompt", q.prompt) for q in queries]
    return Request(prompts, list(texts), None if tokens is None else list(tokens), columns)


def _score(value: float | None, extras: Mapping[str, Float32]) -> Score:
    if value is None:
        return Score(Outcome.NOT_APPLICABLE, float("nan"))
    return Score(Outcome.OK, value, extras=extras)


def _failure(reply: Raised | _Lost) -> Score:
    outcome = Outcome.ERROR if isinstance(reply, Raised) else reply.outcome
    return _failed(outcome, reply.detail)


def _failed(outcome: Outcome, detail: str) -> Score:
    return Score(outcome, float("nan"), detail)
