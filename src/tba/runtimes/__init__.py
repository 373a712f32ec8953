"""Runtimes: where searchers run. The registry."""

from tba.config import InlineRuntimeConfig
from tba.run.folder import RunFolder
from tba.run.rollouts import RolloutLog
from tba.runtimes.base import Runtime, SearchStatus
from tba.runtimes.inline import InlineRuntime
from tba.runtimes.lanes import SearchPlan
from tba.runtimes.local import LocalRuntime
from tba.runtimes.resources import pick_device, searcher_devices, searcher_threads

__all__ = ["InlineRuntime", "LocalRuntime", "Runtime", "SearchPlan", "SearchStatus", "make_runtime"]


def make_runtime(plan: SearchPlan, rollouts: RolloutLog, folder: RunFolder) -> Runtime:
    """Return the runtime that `runtime.kind` names, not yet started.

    Where nobody searches, one process is all that either kind would start.
    """
    if isinstance(plan.config.runtime, InlineRuntimeConfig) or plan.config.search.searchers == 0:
        return InlineRuntime(plan, rollouts, pick_device(plan.config.device))
    return LocalRuntime(
        plan,
        rollouts,
        devices=searcher_devices(plan.config),
        threads=searcher_threads(plan.config),
        log_folder=str(folder.path / "logs"),
    )
