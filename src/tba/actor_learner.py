"""The searcher of A3C: it learns from what it has just sampled, and sends the gradient.

    searcher   trajectories --> batch --> backward with its own, slightly stale weights
               --> Batch with its Gradient
    trainer    Batch with its Gradient --> clipping, AdamW --> the next version (`tba.update`)

The wire carries a number for every weight instead of a few for every token, each batch is learned
from once, and the gradient belongs to a policy that the trainer no longer has. For all other
objectives searchers send trajectories, and the gradient is the trainer's.

Source: "Asynchronous Methods for Deep Reinforcement Learning", arXiv 1602.01783. There the workers
write to the shared weights without a lock; here the trainer applies whole gradients, one optimiser
step each, in the order of their arrival.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.config import Config
from tba.records import Batch, FinishReason, Float32, Gradient, Outcome, Trajectory
from tba.update import BatchLoss


class ActorLearner:
    """The loss on a searcher's own policy and heads."""

    def __init__(self, model: PreTrainedModel, config: Config, eos_ids: Sequence[int]) -> None:
        self._model = model
        self._loss = BatchLoss(model, config, eos_ids)
        self._recomputes = config.model.gradient_checkpointing
        self._last_step = config.trainer.steps - 1

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live weights of policy and heads, as the trainer publishes them."""
        return self._loss.published()

    def learn(self, found: Sequence[Trajectory]) -> Batch | None:
        """Return a search batch with its gradient; None if no query was scored in full."""
        batch = batch_of(found)
        if batch is None:
            return None
        weights = self.weights()
        for weight in weights.values():
            weight.grad = None
        number = min(int(batch.policy_version[0]), self._last_step)  # published after the last one
        self._model.train(self._recomputes)  # there is no dropout; generation needs it off
        metrics = self._loss.backward(batch, number)
        self._model.eval()
        gradient = Gradient(
            of={name: _gradient_of(weight) for name, weight in weights.items()},
            metrics=dict(zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True)),
        )
        return replace(batch, gradient=gradient)


def _gradient_of(weight: Tensor) -> Float32:
    gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
    found: Float32 = gradient.float().cpu().numpy()
    return found


def batch_of(found: Sequence[Trajectory]) -> Batch | None:
    """Make a batch of a search batch as it is, duplicates included: a row for each response.

    Queries of which a response could not be scored are left out; None if none is left.

    Args:
        found: S responses to each query, those to one query side by side.
    """
    of_query: dict[int, list[Trajectory]] = {}
    for trajectory in found:
        of_query.setdefault(trajectory.query_id, []).append(trajectory)
    whole = [
        group for group in of_query.values() if all(t.score.outcome is Outcome.OK for t in group)
    ]
    if not whole:
        return None
    rows = [trajectory for group in whole for trajectory in group]
    samples = len(whole[0])
    return Batch(
        prompts=tuple(group[0].prompt_ids for group in whole),
        tokens=tuple(t.tokens for t in rows),
        log_mu=tuple(t.log_mu for t in rows),
        log_ref=tuple(t.log_ref for t in rows),
        reward=np.array([t.score.reward for t in rows], dtype=np.float32),
        policy_version=np.array([t.policy_version for t in rows]),
        reference_version=np.array([t.reference_version for t in rows]),
        finished=np.array([t.finish_reason is FinishReason.STOP for t in rows]),
        slots=np.full(len(rows), -1),
        query_of_row=np.repeat(np.arange(len(whole)), samples),
        index=np.arange(len(rows)).reshape(len(whole), samples),
        on_policy=np.ones(len(whole), dtype=np.bool_),
        extras={},  # A3C asks for none
    )
