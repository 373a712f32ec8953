"""What a run's parts cost, as they were measured: all that the simulation knows. Free of torch.

Each cost is that of one thread of the run on a machine where nothing else is busy; what two busy
processes do to each other is a figure of its own.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from tba.config import Config
from tba.config.load import load_config
from tba.errors import ConfigError
from tba.run.durable import replace_file, storage_errors

CHANGEABLE = (
    "seed",
    "sync.",
    "buffer.",
    "search.searchers",
    "search.queries_per_batch",
    "search.samples_per_query",
    "trainer.steps",
    "trainer.queries_per_batch",
    "trainer.samples_per_query",
    "evaluation.",
    "checkpoint.",
)
"""Settings that change how costs add up, but not the costs themselves."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, linear in the work: fixed + longest * per_longest + tokens * per_token."""

    fixed_s: float
    """Whatever the work."""
    per_longest_s: float
    """For each token of the longest response: each step of decoding."""
    per_token_s: float
    """For each response token."""

    def seconds(self, tokens: float, longest: float = 0.0) -> float:
        """Return the cost of so many response tokens, the longest response having `longest`."""
        return self.fixed_s + self.per_longest_s * longest + self.per_token_s * tokens


@dataclass(frozen=True, slots=True)
class Measured:
    """One timed piece of work."""

    seconds: float
    """How long it took."""
    tokens: int
    """Response tokens in it."""
    longest: int
    """Tokens of its longest response; 0 where that has no part in it."""


def fit(base: Sequence[Measured], others: Sequence[Measured] = ()) -> Cost:
    """Return the cost, not negative anywhere, that explains what was measured.

    The relative errors are least in square; then all is scaled so that `base`, measured as the run
    is configured, has just the mean that was seen.
    """
    every = [*base, *others]
    seconds = np.array([m.seconds for m in every])
    work = np.array([[1.0, m.longest, m.tokens] for m in every])
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for columns in map(list, itertools.combinations(range(3), size)):
            own = np.zeros(3)
            scaled = work[:, columns] / seconds[:, None]
            own[columns] = np.linalg.lstsq(scaled, np.ones(len(every)), rcond=None)[0]
            error = float((((work @ own) / seconds - 1) ** 2).sum())
            if (own >= 0).all() and error < least - 1e-12:
                best, least = own, error
    explained = float((work[: len(base)] @ best).mean())
    best = best * (float(seconds[: len(base)].mean()) / explained)
    return Cost(*best.tolist())


@dataclass(frozen=True, slots=True)
class Responses:
    """What searchers found, query by query; two equal responses of a query are the same number."""

    lengths: list[list[int]]
    """Tokens of each response; shape [query, sample]."""
    same: list[list[int]]
    """A number for each distinct response of the query; shape [query, sample]."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A run's costs on this machine."""

    config: dict[str, Any]
    """The run's settings, whole."""
    cores: int
    """Cores the run may use."""
    places: float
    """Processes of the run that can be busy at once."""
    trainer_slowdown: float
    """How many times longer a step takes beside a busy searcher, 1 if not at all."""
    searcher_slowdown: float
    """The same of a search batch beside a busy trainer."""
    search: Cost
    """A search batch from its queries to its delivery, weights apart."""
    stages_s: dict[str, float]
    """What a search batch consists of, seconds by stage, as configured."""
    pull_s: float
    """A searcher takes new weights and checks their hash."""
    step: Cost
    """A trainer step: a batch drawn, loss, gradient, optimiser, metrics written."""
    publish_s: float
    """The trainer copies its weights for the searchers."""
    hash_s: float
    """A thread hashes them, after which they are there for searchers."""
    store_s: float
    """The trainer's process takes in a trajectory and logs it."""
    store_wait_s: float
    """The disk makes a delivery durable."""
    add_s: float
    """The trainer puts a trajectory into the buffer."""
    weight_bytes: int
    """The policy as searchers get it."""
    gradient_bytes: int
    """The gradient as trainer ranks would sum it, in float32."""
    queries: int
    """Training queries."""
    responses: Responses
    """Responses of the initial policy."""

    def write(self, path: Path) -> None:
        """Write the profile.

        Raises:
            StorageError: The disk refused it.
        """
        with storage_errors(f"profile {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [json.dumps(dataclasses.asdict(self)).encode()])

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a profile back.

        Raises:
            ConfigError: The file is not there, or holds no profile.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"the profile {path} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path} holds no profile ({where or 'the file'}: {first['msg']}): measure one by "
                "tba plan, without --profile"
            ) from None

    def changed(self, overrides: Sequence[str]) -> Config:
        """Return the run's settings with some changed.

        Raises:
            ConfigError: A setting is wrong, or one on which the costs themselves depend.
        """
        own = load_config([Config.model_validate(self.config)])
        config = load_config([own], overrides)
        before, after = _flat(own.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name) and not name.startswith(CHANGEABLE):
                raise ConfigError(
                    f"the profile was measured with another {name}: measure one with this value by "
                    "tba plan, without --profile"
                )
        return config


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return a tree of settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{above}{name}.") if inner else {f"{above}{name}": value}
    return flat


def lognormal(
    mean: float, deviation: float, count: int, generator: np.random.Generator
) -> NDArray[Any]:
    """Return lengths in tokens, at least 1, lognormal with this mean and standard deviation."""
    variance = np.log1p((deviation / mean) ** 2)
    drawn = generator.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
    return np.maximum(np.rint(drawn), 1).astype(np.int64)
