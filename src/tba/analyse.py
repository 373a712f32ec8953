"""`tba analyse`: a run's samples by staleness, seen by the policy of one of its checkpoints.

    what the samples say      distance of the policy from those that sampled, and log Z
                              (`tba.staleness`)
    what objectives say       loss and gradient of each, and the angles between their gradients
                              (`tba.gradients`)

The samples are those of the buffer as it was when the checkpoint was saved: the rollout log up to
its position, so a run that goes on meanwhile changes nothing. Of a bin one batch is drawn, and both
halves see the same. Nothing of the run is written, and its lock is not asked for.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from tba.annotations import annotation_names
from tba.config import Config, ObjectiveConfig, TrajectoryBalanceConfig
from tba.errors import ConfigError, RunFolderError
from tba.gradients import compare, sections_of
from tba.inputs import Inputs
from tba.objectives import OBJECTIVES
from tba.policy.adapters import load_trainable
from tba.policy.reference import Reference
from tba.policy.resets import load_reference, refreshed
from tba.records import Batch
from tba.run.checkpoint import Checkpoint, load_newest, load_step
from tba.run.durable import replace_file, storage_errors
from tba.run.folder import RunFolder
from tba.run.rebuild import rebuild_buffer
from tba.run.rollouts import read_log
from tba.runtimes.resources import pick_device
from tba.schedules import settings_at
from tba.searcher import stream_seed
from tba.staleness import Bin, BinSamples, draw_bin, measure, reference_log_z, samples_by_bin
from tba.update import BatchLoss

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of an analysis."""

    objectives: tuple[str, ...] | None = None
    """Kinds; none: those of `tba.gradients.DEFAULT` that can be computed."""
    bins: tuple[Bin, ...] | None = None
    """Ranges of staleness; none: those of `metrics.jsonl`."""
    queries: int = 16
    """Most queries in the batch of a bin."""
    samples: int | None = None
    """K; none: the run's `trainer.samples_per_query`."""
    checkpoint: int | None = None
    """Step of the checkpoint; none: the newest."""


@dataclass(frozen=True, slots=True)
class BinReport:
    """What was found for the samples of one range of staleness."""

    bin: str
    """Range of staleness, in versions."""
    samples: int
    """Samples in the buffer."""
    queries: int
    """Queries in the batch that was drawn."""
    unique_share: float
    """Distinct samples among the drawn ones."""
    log_prob_mismatch: float
    """|log pi - log mu| a token."""
    kl_k1: float
    """KL(mu || pi) of a response, mean of log mu - log pi."""
    kl_k3: float
    """The same, by the estimate that is never negative."""
    effective_sample_share: float
    """(sum w)^2 / (K sum w^2)."""
    clipped_share: float
    """Tokens at which PPO's surrogate would be constant."""
    outside_share: float
    """Tokens whose ratio is outside 0.8 to 1.2."""
    log_z: float
    """VarGrad estimate of log Z, mean over queries."""
    reference_queries: int
    """Queries of the batch to which the reference has responded."""
    log_z_reference: float | None
    """log mean exp(r / beta) over the reference's responses, mean over those queries."""
    log_z_difference: float | None
    """VarGrad estimate less that one, mean over those queries."""
    loss: Mapping[str, float]
    """By objective."""
    grad_norm: Mapping[str, float]
    """By objective, before clipping."""
    cosine: tuple[tuple[float, ...], ...]
    """Between the gradients of two objectives, in the order of `Analysis.objectives`."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A range of staleness in which no query has two samples."""

    bin: str
    """Range of staleness, in versions."""
    samples: int
    """Samples in the buffer."""

    def reason(self) -> str:
        """Say why."""
        if self.samples == 0:
            return "the buffer has no such samples"
        return f"no query has two of its samples, of which there are {self.samples}"


@dataclass(frozen=True, slots=True)
class Analysis:
    """What `tba analyse` tells."""

    run: str
    """The run folder."""
    step: int
    """Step of the checkpoint: the version of the policy."""
    objective: str
    """Kind of the run's own objective."""
    beta: float
    """Of both estimates of log Z."""
    reference_weight: float
    """Exponent of the reference in the posterior of both."""
    samples_per_query: int
    """K."""
    objectives: tuple[str, ...]
    """Kinds that were compared."""
    bins: tuple[BinReport, ...]
    """Least stale first."""
    left_out: tuple[LeftOut, ...]
    """Too few samples."""

    def to_json(self) -> str:
        """Return everything as JSON; a number that is not finite becomes null."""
        return json.dumps(_finite(dataclasses.asdict(self)), indent=1, allow_nan=False)

    def write(self, folder: Path) -> None:
        """Write `analysis.json` into a folder, which is made where it does not exist.

        Raises:
            StorageError: The disk refused it.
        """
        with storage_errors(f"analysis in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / "analysis.json", [self.to_json().encode() + b"\n"])


def analyse(run: Path, plan: Plan, tell: Tell = lambda text: None) -> Analysis:
    """Analyse a run, alive or not, at one of its checkpoints; `tell` hears of progress.

    Raises:
        UserError: There is no such run, checkpoint or objective, or no bin has enough samples.
    """
    disable_progress_bar()  # transformers' own
    folder = RunFolder.open(run)
    config = folder.config()
    checkpoint = _find_checkpoint(folder, plan.checkpoint, tell)
    saved = [
        name for name in ("heads", "anchor") if (checkpoint.path / f"{name}.safetensors").exists()
    ]
    logged = annotation_names(config.objective)
    sections = sections_of(plan.objectives, config, logged=logged, saved=saved)
    with _present(checkpoint):
        subject = Subject(folder, config, checkpoint, sections)
    found = samples_by_bin(subject.buffer, checkpoint.state.step, plan.bins)
    drawable = [samples for samples in found if samples.drawable()]
    if not drawable:
        raise ConfigError(
            f"{run} has no query with two samples of one range of staleness at step "
            f"{checkpoint.state.step}, and a single one cannot be compared: choose wider --bins"
        )
    k = plan.samples or config.trainer.samples_per_query
    reports = []
    for samples in drawable:
        tell(f"staleness {samples.bin.name}: {len(samples)} samples")
        reports.append(subject.report(samples, queries=plan.queries, samples_per_query=k))
    return Analysis(
        run=str(run),
        step=checkpoint.state.step,
        objective=config.objective.kind,
        beta=subject.beta,
        reference_weight=subject.reference_weight,
        samples_per_query=k,
        objectives=tuple(sections),
        bins=tuple(reports),
        left_out=tuple(LeftOut(s.bin.name, len(s)) for s in found if not s.drawable()),
    )


class Subject:
    """The policy of a checkpoint, objectives on it, and the buffer as it was then."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        checkpoint: Checkpoint,
        sections: Mapping[str, ObjectiveConfig],
    ) -> None:
        self._folder = folder
        self._config = config
        self._state = checkpoint.state
        self._saved_reference = checkpoint.reference()
        device = torch.device(pick_device(config.device))
        policy = load_trainable(self._initial, config, device=device, checkpoint=checkpoint.path)
        self._model = policy.model
        self._losses = {}
        for kind, section in sections.items():
            own = config.model_copy(update={"objective": section})
            self._losses[kind] = BatchLoss(policy.model, own, policy.eos_ids)
            checkpoint.restore_beside_the_policy(self._losses[kind].beside_the_policy())
        self._inputs = Inputs(policy.model, OBJECTIVES["tb"], config, policy.eos_ids)
        step, steps = self._state.step, config.trainer.steps
        self.beta = _beta(config, step)
        settings = settings_at(config.objective, step, steps)
        self.reference_weight = float(settings.get("reference_weight", 1.0))
        until = self._state.rollout_position
        logged = read_log(folder.rollouts, until)
        self.buffer = rebuild_buffer(logged, config, checkpoint, self._state.step).buffer
        self._log_z_of: dict[int, float] = {}
        drawn = config.search.temperature_range is not None  # then not the reference's own samples
        if self._state.reference_version == 0 and not drawn:
            reference = read_log(folder.rollouts, until)
            self._log_z_of = reference_log_z(reference, self.beta, self.reference_weight)

    def report(self, samples: BinSamples, *, queries: int, samples_per_query: int) -> BinReport:
        """Draw a batch of a bin and say all about it."""
        batch = self.draw(samples, queries=queries, samples_per_query=samples_per_query)
        measures = measure(
            self._inputs,
            batch,
            beta=self.beta,
            reference_weight=self.reference_weight,
            micro_batch_tokens=self._config.trainer.micro_batch_tokens,
        )
        means: dict[str, Any] = {name: float(values.mean()) for name, values in measures.items()}
        compared = compare(self._losses, self._model, batch, self._state.step)
        return BinReport(
            bin=samples.bin.name,
            samples=len(samples),
            queries=len(batch.prompts),
            unique_share=len(batch.tokens) / batch.index.size,
            loss=compared.loss,
            grad_norm=compared.grad_norm,
            cosine=compared.cosine,
            **means,
            **self._against_the_reference(batch, measures["log_z"]),
        )

    def draw(self, samples: BinSamples, *, queries: int, samples_per_query: int) -> Batch:
        """Draw the batch of a bin, the same one for the same run, checkpoint and sizes."""
        seed = stream_seed(self._config.seed, "analyse", samples.bin.low)
        batch = draw_bin(
            self.buffer,
            samples,
            queries=queries,
            samples_per_query=samples_per_query,
            generator=np.random.default_rng(seed),
        )
        if (batch.reference_version == self._state.reference_version).all():
            return batch
        return refreshed(batch, self.buffer, self._reference, self._state.reference_version)

    @cached_property
    def _reference(self) -> Reference:
        return load_reference(
            self._initial, self._config, device=self._model.device, saved=self._saved_reference
        )

    @property
    def _initial(self) -> str:
        """Where the initial model is."""
        made_here = self._folder.model.is_dir()
        return str(self._folder.model if made_here else self._config.model.model_name_or_path)

    def _against_the_reference(self, batch: Batch, log_z: NDArray[np.float64]) -> dict[str, Any]:
        """Compare the VarGrad estimates with those from the reference's responses."""
        numbers = self.buffer.field("query", batch.slots[batch.index[:, 0]])
        ids = self.buffer.queries_seen[numbers].tolist()
        known = np.array([query_id in self._log_z_of for query_id in ids])
        found: dict[str, Any] = {"reference_queries": int(known.sum())}
        if not known.any():
            return found | {"log_z_reference": None, "log_z_difference": None}
        estimates = np.array([self._log_z_of[i] for i in ids if i in self._log_z_of])
        return found | {
            "log_z_reference": float(estimates.mean()),
            "log_z_difference": float((log_z[known] - estimates).mean()),
        }


def _find_checkpoint(folder: RunFolder, step: int | None, tell: Tell) -> Checkpoint:
    if step is not None:
        return load_step(folder.checkpoints, step)
    newest = load_newest(folder.checkpoints, tell)
    if newest is None:
        raise RunFolderError(
            f"{folder.path} has no checkpoint yet: wait for one, or stop the run, which saves one"
        )
    return newest


@contextmanager
def _present(checkpoint: Checkpoint) -> Iterator[None]:
    """Say in a sentence that a live run has removed the checkpoint that is being read."""
    try:
        yield
    except Exception as error:
        if checkpoint.path.exists():
            raise
        raise RunFolderError(
            f"checkpoint {checkpoint.path} was superseded while it was read: try again"
        ) from error


def _beta(config: Config, step: int) -> float:
    """Return the run's beta at a step, or the default of `tb` where the run has none above 0."""
    steps = config.trainer.steps
    own = settings_at(config.objective, step, steps).get("beta", 0.0)
    return float(own or settings_at(TrajectoryBalanceConfig(), step, steps)["beta"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
