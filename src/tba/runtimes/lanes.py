"""How a searcher comes into being: the same in every runtime, in whatever process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tba.actor_learner import ActorLearner
from tba.annotations import Annotations, SearchTools, annotators
from tba.config import Config
from tba.engines.base import Sampling
from tba.engines.linears import quicken
from tba.engines.merging import MergingEngine
from tba.engines.torch_engine import TorchEngine
from tba.objectives import load_objective
from tba.pace import NO_ROUND, Lane, searches_per_round
from tba.policy.loading import Policy, load_policy
from tba.policy.reference import Reference
from tba.searcher import Judge, Searcher, Seat, Stage, Stores, Tickets
from tba.tasks import task_of
from tba.tasks.scoring import Scorer


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """All that a searcher must be told; picklable for `torch.multiprocessing`."""

    config: Config
    """The run's settings."""
    model_folder: str
    """The initial policy, which is also the first reference."""
    stores: Stores
    """The weights' wires."""
    next_ticket: int
    """Lowest number that no search batch had yet."""

    def first_ticket(self, lane: int) -> int:
        """Return the first ticket of a lane: lane i of n takes the tickets that are i modulo n."""
        return self.next_ticket + (lane - self.next_ticket) % self.config.search.searchers


@contextmanager
def open_lane(
    plan: SearchPlan, seat: Seat, first_ticket: int, device: str, *, ended: int = NO_ROUND
) -> Iterator[Lane]:
    """Load policy, reference, task and scorer, and put a searcher on a lane."""
    config = plan.config
    dtype = getattr(torch, config.search.dtype)
    policy = load_policy(plan.model_folder, config.model, device=torch.device(device), dtype=dtype)
    quicken(policy.model, config.search.precision)
    reference = load_policy(
        plan.model_folder, config.model, device=policy.model.device, dtype=dtype
    )
    task = task_of(config, policy)
    with Scorer(task.reward, announce=lambda: seat.announce(Stage.SCORING)) as scorer:
        tools = SearchTools(
            engine=_engine(plan, policy, reference),
            reference_engine=TorchEngine(reference.model, policy.eos_ids),
            reference=Reference(
                reference.model,
                temperature=config.search.temperature,
                micro_batch_tokens=config.trainer.micro_batch_tokens,
            ),
            judge=Judge(scorer, policy.tokenizer),
            sampling=Sampling(
                samples_per_query=config.search.samples_per_query,
                temperature=config.search.temperature,
                max_completion_length=config.search.max_completion_length,
            ),
            eos_ids=policy.eos_ids,
            temperature_range=config.search.temperature_range,
        )
        searcher = Searcher(
            tools,
            Annotations(annotators(config.objective), tools),
            learner=_learner(policy, config),
            tickets=Tickets(task.train, config.search.queries_per_batch, config.seed),
            stores=plan.stores,
            seat=seat,
        )
        yield Lane(
            searcher,
            config.sync.mode,
            searches_per_round=searches_per_round(config),
            first_ticket=first_ticket,
            stride=config.search.searchers,
            ended=ended,
        )


def _engine(plan: SearchPlan, policy: Policy, reference: Policy) -> TorchEngine:
    """Return what generates with the weights that the trainer publishes, adapters or all."""
    lora = plan.config.model.lora
    if lora is None:
        return TorchEngine(policy.model, policy.eos_ids)
    return MergingEngine(
        policy.model,
        policy.eos_ids,
        base=reference.model,
        adapter=plan.stores.policy.room(policy.model.device),
        scale=lora.scale,
    )


def _learner(policy: Policy, config: Config) -> ActorLearner | None:
    """Return what computes gradients in the searcher, for an objective that has them sent."""
    if not load_objective(config.objective).sends_gradients:
        return None
    return ActorLearner(policy.model, config, policy.eos_ids)
