"""A sitting of a run: preparation, training, and what surrounds the loop.

    run folder --> initial model (built, warm-started or loaded) --> policy, task, optimiser,
                   buffer (rebuilt from the rollout log)
               --> searchers start; the initial policy is evaluated while they fill the buffer
               --> Trainer.steps(): metrics, progress, evaluation, checkpoints
               --> searchers end; final checkpoint, evaluation, summary

The loop itself is `tba.trainer`; nothing here knows what a step does.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tba.background import BackgroundEvaluation
from tba.config import Config, InlineRuntimeConfig
from tba.errors import StorageError, TbaError
from tba.evaluation import evaluate_policy
from tba.given import batches, check_objective, check_temperatures, read_given
from tba.pace import Arrivals, Intake, longest_search_s
from tba.policy.adapters import load_trainable
from tba.policy.initial import initial_model
from tba.policy.loading import check_positions
from tba.policy.precision import autocast_dtype
from tba.policy.resets import ReferenceResets, load_reference
from tba.records import EvalReport, StepReport
from tba.reference_answers import ReferenceAnswers
from tba.run.checkpoint import (
    Checkpoint,
    TrainerState,
    load_newest,
    remove_superseded,
    save_checkpoint,
    step_folder,
)
from tba.run.folder import RunFolder
from tba.run.interrupt import StopSignal
from tba.run.ledger import Ledger
from tba.run.logs import log_to
from tba.run.metrics import MetricsWriter
from tba.run.progress import Progress
from tba.run.rebuild import Rebuilt, rebuild_buffer
from tba.run.rollouts import RolloutLog
from tba.run.summary import Ending, Summary, Totals, summarize
from tba.runtimes import SearchPlan, make_runtime
from tba.runtimes.resources import available_cores, check_devices, pick_device, trainer_threads
from tba.searcher import Judge, Stores
from tba.sync import WeightStore
from tba.tasks import task_of
from tba.tasks.scoring import Scorer
from tba.trainer import Trainer
from tba.update import PolicyUpdate

log = logging.getLogger(__name__)

NOT_EVALUATED = "pass@1 is not measured, since the task has no reward function"


def run(config: Config, run_dir: Path, *, resume: bool, clean: bool, progress: Progress) -> Summary:
    """Train as configured, in a run folder, and return what came of it.

    Args:
        config: The settings.
        run_dir: The run folder.
        resume: Go on with the run in that folder.
        clean: Delete the run that is in that folder first.
        progress: What the user sees meanwhile.

    Raises:
        TbaError: The run could not be done; its folder, where there is one, is resumable and says
            why.
    """
    disable_progress_bar()  # transformers' own would tear ours
    opened = RunFolder.resume(run_dir) if resume else RunFolder.create(run_dir, config, clean=clean)
    with opened as folder, ExitStack() as stack:
        stack.enter_context(log_to(folder.log("trainer"), progress.event))
        session = Session(config, folder, stack.enter_context(StopSignal(progress.event)), progress)
        newest = load_newest(folder.checkpoints) if resume else None
        session.prepare(stack, newest)
        folder.begun()
        return session.run()


class Session:
    """All the parts of one sitting."""

    def __init__(
        self, config: Config, folder: RunFolder, stop: StopSignal, progress: Progress
    ) -> None:
        self._config = config
        self._folder = folder
        self._stop = stop
        self._progress = progress
        self._started = time.perf_counter()
        self._before: EvalReport | None = None
        self._saved_step = -1
        self._evaluated_step = 0

    def prepare(self, stack: ExitStack, checkpoint: Checkpoint | None) -> None:
        """Load or make every part; what must be closed goes onto the stack."""
        config, folder = self._config, self._folder
        if config.buffer.given != "nothing":
            check_objective(config)
        if config.search.temperature_range is not None:
            check_temperatures(config.objective)
        version = 0
        if checkpoint is not None:
            version = self._saved_step = self._evaluated_step = checkpoint.state.step
            self._before = checkpoint.state.before
            self._progress.event(f"resuming from {checkpoint.path}")
        device = torch.device(pick_device(config.device))
        check_devices(config)
        model_folder = initial_model(config, folder.model, device, self._progress.event)
        saved = checkpoint.path if checkpoint else None
        self._policy = load_trainable(model_folder, config, device=device, checkpoint=saved)
        self._task = task_of(config, self._policy, given=config.buffer.given)
        if self._task.skipped:
            self._progress.event(
                f"skipped {self._task.skipped} prompts longer than task.max_prompt_length"
            )
        queries = [*self._task.train, *self._task.test]
        check_positions(self._policy.model, queries, config.search.max_completion_length)
        self._scorer = self._open_scorer(stack)
        self._background = stack.enter_context(
            BackgroundEvaluation(folder, config.evaluation.timeout_s, self._progress.event)
        )
        self._rollouts = stack.enter_context(self._open_rollouts(checkpoint))
        self._metrics = stack.enter_context(MetricsWriter(folder.metrics, resumed_step=version))
        rebuilt = self._rebuild_buffer(checkpoint, version)
        self._buffer = rebuilt.buffer
        if config.buffer.given != "nothing":
            self._add_given(model_folder, rebuilt.given)
        totals = checkpoint.state.totals if checkpoint else Totals()
        self._ledger = Ledger(totals, self._buffer, started=self._started)
        self._update = PolicyUpdate(self._policy.model, config, self._policy.eos_ids)
        low = autocast_dtype(config.trainer.precision, self._policy.model)
        log.info("the trainer's forward pass is computed in %s", low or torch.float32)
        if checkpoint is not None:
            checkpoint.restore_optimizer(self._update.optimizer)
            checkpoint.restore_beside_the_policy(self._update.beside_the_policy())
        self._assemble(model_folder, checkpoint, version, rebuilt.next_ticket)

    def _assemble(
        self, model_folder: str, checkpoint: Checkpoint | None, version: int, next_ticket: int
    ) -> None:
        """Lay the wires and put trainer and runtime at their ends."""
        config = self._config
        published = self._update.published() if config.search.searchers else {}
        store = WeightStore(published, getattr(torch, config.search.dtype))
        self._resets = self._make_resets(model_folder, checkpoint)
        stores = Stores(store, self._resets.store if self._resets else None)
        plan = SearchPlan(config, model_folder, stores, next_ticket)
        self._runtime = make_runtime(plan, self._rollouts, self._folder)
        per_search = config.search.queries_per_batch * config.search.samples_per_query
        arrivals = Arrivals(
            self._buffer,
            pass_threshold=self._task.pass_threshold,
            hopeless_after=max(config.buffer.initial_samples, 2 * per_search),
        )
        if checkpoint is not None:
            arrivals.share = checkpoint.state.searched_pass_at_1
        self._intake = Intake(
            self._runtime, arrivals, timeout_s=longest_search_s(config), interrupted=self._stop
        )
        self._trainer = Trainer(
            config,
            update=self._update,
            buffer=self._buffer,
            intake=self._intake,
            store=store,
            resets=self._resets,
            version=version,
        )

    def run(self) -> Summary:
        """Train, save, evaluate; whatever happens, leave a folder that tells and can be resumed."""
        try:
            self._trainer.publish_all()  # before there is a searcher to take them
            with self._runtime:
                torch.set_num_threads(trainer_threads(self._config))
                self._loop()
            torch.set_num_threads(available_cores())
            self._intake.take()  # what searchers delivered on leaving
            self._save()
            self._evaluated(self._background.finish(self._stop))
            interrupted = self._stop()
            after = None if interrupted else self._evaluate()
        except TbaError as error:
            self._fail(error)
            raise
        if interrupted:
            return self._summary(Ending.INTERRUPTED, None, self._stop.reason)
        return self._summary(Ending.FINISHED, after, "" if self._scorer else NOT_EVALUATED)

    def _loop(self) -> None:
        if self._before is None:
            self._before = self._evaluate()
        self._evaluate_again()
        self._stop.stepping = True
        for report in self._trainer.steps():
            self._note(report)
            if report.published:
                self._at_sync(report.step)
            self._evaluated(self._background.take())

    def _at_sync(self, step: int) -> None:
        """Save and evaluate what has become due since the last sync."""
        evaluate = self._evaluation_is_due(step, since=self._evaluated_step)
        inline = isinstance(self._config.runtime, InlineRuntimeConfig)
        if evaluate:
            self._evaluated_step = step
        if evaluate and inline:
            self._evaluate()  # before the checkpoint, so that a resumed run has it too
        save = self._config.checkpoint.every
        if save and step - max(self._saved_step, 0) >= save:
            self._save()
        if evaluate and not inline:
            self._background.start(self._save())

    def _evaluation_is_due(self, step: int, *, since: int) -> bool:
        every = self._config.evaluation.every
        if self._before is None:  # there is nothing to measure
            return False
        return bool(every) and since // every < step // every and step < self._config.trainer.steps

    def _evaluate_again(self) -> None:
        """Evaluate the checkpoint that was resumed from, if that was due and has not ended."""
        step = self._saved_step
        if step < 1 or isinstance(self._config.runtime, InlineRuntimeConfig):
            return
        checkpoint = step_folder(self._folder.checkpoints, step)
        ended = (self._folder.evaluations / f"{checkpoint.name}.json").is_file()
        due = self._evaluation_is_due(step, since=step - self._config.sync.sync_every)
        if due and not ended:
            self._background.start(checkpoint)

    def _note(self, report: StepReport) -> None:
        status = self._runtime.status()
        self._ledger.note(report)
        metrics = {**report.metrics, **self._ledger.rates(status)}
        self._metrics.write(report.step, metrics, staleness=report.staleness)
        self._progress.update(StepReport(report.step, metrics, report.staleness, report.published))

    def _evaluate(self) -> EvalReport | None:
        """Measure the present policy on held-out queries, in the trainer's precision.

        Returns:
            None where there is neither a reward function nor a held-out demonstration.
        """
        report = evaluate_policy(
            self._policy,
            self._scorer,
            task=self._task,
            config=self._config,
            policy_version=self._trainer.version,
            reference=ReferenceAnswers(self._folder.reference_answers),
        )
        if self._config.model.gradient_checkpointing:
            self._policy.model.train()  # the engine sets the model to evaluation
        self._evaluated(report)
        return report

    def _evaluated(self, report: EvalReport | None) -> None:
        if report is not None:
            self._progress.evaluated(report)
            self._metrics.write(report.policy_version, report.metrics())

    # --- what is kept

    def _save(self) -> Path:
        """Write a checkpoint of this moment, unless there is one, and return its folder."""
        if self._saved_step == self._trainer.version:
            return step_folder(self._folder.checkpoints, self._saved_step)
        resets = self._resets
        state = TrainerState(
            step=self._trainer.version,
            reference_version=resets.version if resets else 0,
            rollout_position=self._rollouts.position,
            resumptions=self._resumptions,
            searched_pass_at_1=self._intake.arrivals.share,
            before=self._before,
            totals=self._ledger.totals(self._runtime.status()),
        )
        saved = save_checkpoint(
            self._folder.checkpoints,
            state,
            policy=self._policy,
            optimizer=self._update.optimizer,
            beside_the_policy=self._update.beside_the_policy(),
            buffer=self._buffer.state(),
            reference=resets.reference.weights() if resets and resets.version else None,
        )
        self._saved_step = self._trainer.version
        remove_superseded(
            self._folder.checkpoints,
            keep=self._config.checkpoint.keep,
            until=self._saved_step,
            in_use=self._background.checkpoint,
        )
        return saved

    def _fail(self, error: TbaError) -> None:
        """Leave a checkpoint, where the disk allows one, and a summary that gives the reason."""
        try:
            if self._trainer.version > 0:
                self._save()
        except StorageError as second:
            log.error("no checkpoint could be saved: %s", second)
        try:
            self._summary(Ending.FAILED, None, str(error))
        except StorageError as second:
            log.error("no summary could be saved: %s", second)

    def _summary(self, ended: Ending, after: EvalReport | None, detail: str = "") -> Summary:
        summary = summarize(
            self._ledger.totals(self._runtime.status()),
            steps=self._trainer.version,
            before=self._before,
            after=after,
            ended=ended,
            detail=detail,
        )
        summary.write(self._folder.summary)
        return summary

    # --- preparation

    def _open_rollouts(self, checkpoint: Checkpoint | None) -> RolloutLog:
        """Open the log; an inline run goes back to its checkpoint and will find the same again."""
        rollouts = RolloutLog(self._folder.rollouts)
        if rollouts.dropped_bytes:
            self._progress.event(
                f"rollout log: dropped a torn tail of {rollouts.dropped_bytes} bytes"
            )
        if isinstance(self._config.runtime, InlineRuntimeConfig):
            rollouts.truncate(checkpoint.state.rollout_position if checkpoint else rollouts.start)
        return rollouts

    def _open_scorer(self, stack: ExitStack) -> Scorer | None:
        """Start the scoring process, unless there is no reward function and nobody searches."""
        if self._config.search.searchers == 0 and not self._task.reward.functions:
            self._progress.event(NOT_EVALUATED)
            return None
        return stack.enter_context(Scorer(self._task.reward))

    def _rebuild_buffer(self, checkpoint: Checkpoint | None, version: int) -> Rebuilt:
        """Return the buffer as the log has it, and what else was read."""
        rebuilt = rebuild_buffer(self._rollouts.read(), self._config, checkpoint, version)
        earlier = checkpoint.state.resumptions if checkpoint else ()
        self._resumptions = (*earlier, (rebuilt.rows, version)) if rebuilt.rows else earlier
        return rebuilt

    def _add_given(self, model_folder: str, logged: Mapping[int, int]) -> None:
        """Put those answers of the training rows into log and buffer that the log lacks."""
        config, policy = self._config, self._policy
        longest = config.search.max_completion_length
        given = read_given(config.buffer.given, self._task, policy, longest=longest)
        if skipped := given.skipped():
            self._progress.event(skipped)
        if not (missing := given.missing(logged)):
            return
        self._progress.event(given.beginning(config, known := sum(logged.values())))
        reference = load_reference(model_folder, config, device=policy.model.device, saved=None)
        judge = Judge(self._scorer, policy.tokenizer) if self._scorer else None
        results = []
        for batch in batches(
            missing, reference, judge, config.search.temperature, is_first=not known
        ):
            self._rollouts.append(batch)
            results.append(self._buffer.add(batch))
        if excluded := sum(result.excluded for result in results):
            self._progress.event(f"{excluded} of these could not be scored and are left out")

    def _make_resets(
        self, model_folder: str, checkpoint: Checkpoint | None
    ) -> ReferenceResets | None:
        config = self._config
        if config.sync.reference_reset_every is None:
            return None
        reference = load_reference(
            model_folder,
            config,
            device=self._policy.model.device,
            saved=checkpoint.reference() if checkpoint else None,
        )
        return ReferenceResets(
            reference,
            WeightStore(reference.weights(), getattr(torch, config.search.dtype)),
            every=config.sync.reference_reset_every,
            version=checkpoint.state.reference_version if checkpoint else 0,
        )
