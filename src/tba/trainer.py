"""The trainer's box of the algorithm (`algorithm.md` section 2).

    Trainer, for t = 1..N:
      T0. what the searchers delivered goes to D_global
      T1. batch: B times, with probability m a query of the most recent sync and K of its newest
          samples, otherwise any query ever seen and K of its samples; where searchers send
          gradients (A3C), the next batch that came with one; where nobody searches, epochs
      T2. one optimiser step on the objective with the current beta(t)
      T3. every rho steps the reference becomes the policy; every k steps publish theta

`Trainer.step` is these lines; `Trainer.steps` yields a report of each, for logs, checkpoints,
evaluation and stop rules to consume from outside. A step without a finite loss and gradient is
skipped and counted.
"""

import time
from collections.abc import Iterator

import numpy as np

from tba.buffer import ReplayBuffer
from tba.config import Config
from tba.errors import ConfigError, DivergedError
from tba.pace import Intake, Pace
from tba.policy.resets import ReferenceResets
from tba.records import Batch, Int64, StepReport
from tba.sampling import draw_batch, draw_in_epochs
from tba.searcher import stream_seed
from tba.sync import WeightStore
from tba.update import PolicyUpdate, UpdateResult

BOUNDED = "samples within buffer.max_staleness and buffer.max_reuse"


class Trainer:
    """Learns from everything in the buffer, and never waits if it need not."""

    def __init__(
        self,
        config: Config,
        *,
        update: PolicyUpdate,
        buffer: ReplayBuffer,
        intake: Intake,
        store: WeightStore,
        resets: ReferenceResets | None,
        version: int,
    ) -> None:
        self._config = config
        self._update = update
        self._buffer = buffer
        self._intake = intake
        self._store = store
        self._resets = resets
        self._pace = Pace(config.sync.mode, intake)
        self._bad_in_a_row = 0
        self.version = version
        """Optimiser steps done: the policy's version."""

    def steps(self) -> Iterator[StepReport]:
        """Train to the last step, yielding a report of each; ends early only when interrupted."""
        if not self._pace.fill(self._filled):
            return
        while self.version < self._config.trainer.steps and not self._intake.interrupted():
            report = self.step()
            if report is None:
                return
            yield report
            self._stop_if_diverged()

    def step(self) -> StepReport | None:
        """Do one step of the algorithm; returns None if interrupted while waiting."""
        started, waited = time.perf_counter(), self._intake.waited_s
        if not self._pace.before_step(round_starts=self._at_sync()):  # T0
            return None
        batch = self._draw()  # T1
        if batch is None:
            return None
        staleness = np.maximum(self.version - batch.policy_version[batch.index].ravel(), 0)
        result = self._update.step(batch, self.version)  # T2
        self._count(result)
        if self._resets is not None and self._resets.due(self.version):  # T3
            self._resets.reset(self._update.model, self.version)
            if self._searched_at_once:
                self._resets.store.flush()
        if self._at_sync():
            self._pace.sync(self.publish)
        seconds = time.perf_counter() - started
        return self._report(result, batch, staleness, seconds, self._intake.waited_s - waited)

    def publish_all(self) -> None:
        """Give policy and reference to searchers that have not started; wait for the hashes."""
        if self._resets is not None:
            self._resets.publish()
            self._resets.store.flush()
        self.publish()
        self._store.flush()

    def publish(self) -> None:
        """Give the present weights to the searchers, under the present version."""
        self._store.publish(self._update.published(), self.version)
        if self._searched_at_once:
            self._store.flush()

    @property
    def _nobody_searches(self) -> bool:
        return self._config.search.searchers == 0

    @property
    def _searched_at_once(self) -> bool:
        """Whether searchers search as soon as weights are published, and with no older ones."""
        return self._config.sync.mode != "free" or self._config.runtime.kind == "inline"

    def _at_sync(self) -> bool:
        return self.version % self._config.sync.sync_every == 0

    def _filled(self) -> bool:
        if self._nobody_searches or self._update.gradients_are_sent:
            return True  # there is nothing to come, or nothing drawn from the buffer
        enough = self._config.buffer.initial_samples
        if self._config.sync.mode != "lockstep":  # which searches before the first step anyway
            enough = max(enough, self._config.trainer.samples_per_query)
        if self.version > 0:  # resumed with a full buffer: wait for the searchers to start alone
            free = self._config.sync.mode == "free" and self._config.runtime.kind == "local"
            enough = 1 if free else 0
        return self._intake.arrivals.scored >= enough

    def _draw(self) -> Batch | None:
        """Draw this step's batch; wait only where the bounds leave nothing to draw."""
        batch = self._try_to_draw()
        if batch is None and self._nobody_searches:
            raise ConfigError(
                f"every given answer was used buffer.max_reuse = {self._config.buffer.max_reuse} "
                f"times after {self.version} steps: raise it, or ask for fewer trainer.steps"
            )
        if batch is None:

            def drawn() -> bool:
                nonlocal batch
                batch = self._try_to_draw()
                return batch is not None

            what = "a gradient" if self._update.gradients_are_sent else BOUNDED
            if not self._pace.wait_for_samples(drawn, what):
                return None
        assert batch is not None
        if self._resets is None or batch.gradient is not None:
            return batch
        return self._resets.refresh(batch, self._buffer)

    def _try_to_draw(self) -> Batch | None:
        if self._update.gradients_are_sent:
            return self._intake.runtime.next_gradient()
        generator = np.random.default_rng(stream_seed(self._config.seed, "draw", self.version))
        trainer, buffer = self._config.trainer, self._config.buffer
        if self._nobody_searches:
            return draw_in_epochs(
                self._buffer,
                queries_per_batch=trainer.queries_per_batch,
                samples_per_query=trainer.samples_per_query,
                max_reuse=buffer.max_reuse,
                generator=generator,
            )
        return draw_batch(
            self._buffer,
            queries_per_batch=trainer.queries_per_batch,
            samples_per_query=trainer.samples_per_query,
            trainer_version=self.version,
            config=buffer,
            generator=generator,
        )

    def _count(self, result: UpdateResult) -> None:
        self.version += 1
        self._bad_in_a_row = self._bad_in_a_row + 1 if result.skipped else 0

    def _stop_if_diverged(self) -> None:
        if self._bad_in_a_row >= self._config.trainer.max_bad_steps:
            beta = " or raise objective.beta" if hasattr(self._config.objective, "beta") else ""
            raise DivergedError(
                f"{self._bad_in_a_row} steps in a row had no finite loss and gradient (the last "
                f"one was step {self.version}), so training has diverged: lower "
                f"trainer.learning_rate{beta}"
            )

    def _report(
        self, result: UpdateResult, batch: Batch, staleness: Int64, seconds: float, waited_s: float
    ) -> StepReport:
        tokens = sum(len(t) for t in batch.tokens)
        metrics = {
            **result.metrics,
            "skipped": float(result.skipped),
            **self._intake.arrivals.metrics(),
            "staleness_min": float(staleness.min()),
            "staleness_mean": float(staleness.mean()),
            "staleness_max": float(staleness.max()),
            "on_policy_share": float(batch.on_policy.mean()),
            "unique_share": len(batch.tokens) / batch.index.size,
            "truncated_share": float(1 - batch.finished.mean()),
            "tokens_trained": float(tokens),
            "buffer_size": float(len(self._buffer)),
            "step_s": seconds,
            "wait_s": waited_s,
            "train_tokens_per_s": tokens / max(seconds - waited_s, 1e-9),
        }
        return StepReport(self.version, metrics, staleness, published=self._at_sync())
