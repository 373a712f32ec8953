"""`tba eval`: what a policy can do on held-out queries, and how far it is from its reference.

greedy pass@1      one response a query, the likeliest token each time
pass@k             without bias from n sampled responses a query (Chen et al., 2107.03374)
reward             mean raw reward of the sampled responses; then what the task itself measures
perplexity         exp(-mean log p_ref) over the response tokens sampled, without temperature
KL                 mean over responses of log pi - log p_ref, at the sampling temperature
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from tba.config import Config
from tba.engines.base import Sampling
from tba.engines.torch_engine import TorchEngine
from tba.evaluation import (
    Answers,
    ask,
    kl_to_reference,
    paper_perplexity,
    perplexity,
    sampled_texts,
)
from tba.policy.loading import Policy, check_positions, load_policy
from tba.policy.reference import Reference
from tba.records import Float32
from tba.run.checkpoint import load_newest
from tba.run.folder import RunFolder
from tba.runtimes.resources import pick_device
from tba.tasks import Task, load_task
from tba.tasks.scoring import Scorer


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What `tba eval` tells."""

    policy: str
    """Folder or hub name of the policy."""
    reference: str
    """Folder or hub name of the reference."""
    queries: int
    """Held-out queries asked."""
    samples: int
    """n: responses sampled for each."""
    greedy_pass_at_1: float | None
    """Share of queries whose likeliest response is correct; None where the task knows no right and
    wrong."""
    pass_at: dict[int, float]
    """Chance by k that one of k sampled responses is correct; empty where nothing is."""
    measured: dict[str, float]
    """The mean raw reward, and what the task measures besides, of the sampled responses."""
    mean_response_tokens: float
    """Mean length of the sampled responses, in tokens."""
    perplexity: float
    """Of the sampled responses under the reference."""
    paper_perplexity: float
    """The same with prompt tokens counted in the denominator, as the paper's code has it."""
    kl: float
    """To the reference, in nats a response."""
    excluded: int
    """Responses whose reward failed."""

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values to read."""
        pass_at = [
            (f"pass@{k}, sampled", f"{100 * value:.1f} %") for k, value in self.pass_at.items()
        ]
        if self.greedy_pass_at_1 is not None:
            pass_at.insert(0, ("pass@1, greedy", f"{100 * self.greedy_pass_at_1:.1f} %"))
        measured = [
            (name.replace("_", " "), f"{value:.4g}") for name, value in self.measured.items()
        ]
        return [
            *pass_at,
            *measured,
            ("samples a query", str(self.samples)),
            ("response tokens", f"{self.mean_response_tokens:.1f}"),
            ("perplexity under the reference", f"{self.perplexity:.3f}"),
            ("the paper's perplexity (prompts counted)", f"{self.paper_perplexity:.3f}"),
            ("KL to the reference, nats a response", f"{self.kl:.4f}"),
            ("excluded", str(self.excluded)),
            ("reference", self.reference),
        ]


class Pair(NamedTuple):
    """Where a policy and its reference are."""

    policy: str
    reference: str
    untrained: bool = False
    """Whether the policy is a run's initial model, because the run has no checkpoint yet."""


def find_models(source: str, reference: str | None) -> Pair:
    """Return the newest checkpoint of a run and its initial model, or a model and itself.

    Raises:
        RunFolderError: The run's folder is damaged.
    """
    folder = RunFolder(Path(source))
    if not folder.lock_file.is_file():
        return Pair(source, reference or source)
    made_here = folder.model.is_dir()
    initial = str(folder.model if made_here else folder.config().model.model_name_or_path)
    newest = load_newest(folder.checkpoints)
    policy = str(newest.policy) if newest else initial
    return Pair(policy, reference or initial, untrained=newest is None)


def evaluate_models(
    config: Config, models: Pair, *, samples: int, ks: Sequence[int]
) -> PolicyReport:
    """Measure a policy on the configured task.

    Raises:
        UserError: A model, the task or its reward cannot be used.
        AllExcludedError: Hardly any response could be scored.
    """
    disable_progress_bar()  # transformers' own, of loading
    policy = _load(config, models.policy)
    place = str(policy.model.device)
    task = load_task(config.task, policy.tokenizer, eos_ids=policy.eos_ids, device=place)
    queries = task.test[: config.evaluation.queries]
    temperature = config.search.temperature
    check_positions(policy.model, queries, config.search.max_completion_length)
    engine = TorchEngine(policy.model, policy.eos_ids)
    with Scorer(task.reward) as scorer:
        sampled, greedy = ask(
            engine, scorer, task=task, tokenizer=policy.tokenizer, config=config, samples=samples
        )
    reference = policy if models.reference == models.policy else _load(config, models.reference)
    measured = sampled.measured(task, _reference_texts(config, task, reference, samples))
    at_temperature = log_probs_under(reference, sampled, temperature)
    untempered = at_temperature
    if temperature != 1:
        untempered = log_probs_under(reference, sampled, 1.0)
    responses, asked = sampled.answered.responses, sampled.answered.queries
    failures = len(sampled.failures) + (len(greedy.failures) if greedy else 0)
    pass_at = {k: sampled.pass_at(k) for k in ks}
    return PolicyReport(
        policy=models.policy,
        reference=models.reference,
        queries=len(queries),
        samples=samples,
        greedy_pass_at_1=greedy.pass_at(1) if greedy else None,
        pass_at={k: share for k, share in pass_at.items() if share is not None},
        measured=measured,
        mean_response_tokens=sampled.response_tokens / (len(queries) * samples),
        perplexity=perplexity(untempered),
        paper_perplexity=paper_perplexity(untempered, [len(q.prompt_ids) for q in asked]),
        kl=kl_to_reference([response.log_mu for response in responses], at_temperature),
        excluded=failures,
    )


def _reference_texts(
    config: Config, task: Task, reference: Policy, samples: int
) -> list[str] | None:
    """Ask the reference the same with the same random numbers, where a measure compares."""
    if not task.compares_with_reference:
        return None
    search, evaluation = config.search, config.evaluation
    return sampled_texts(
        TorchEngine(reference.model, reference.eos_ids),
        queries=task.test[: evaluation.queries],
        tokenizer=reference.tokenizer,
        sampling=Sampling(samples, search.temperature, search.max_completion_length),
        queries_per_batch=max(1, evaluation.queries_per_batch // samples),
        seed=config.seed,
    )


def log_probs_under(policy: Policy, answers: Answers, temperature: float) -> list[Float32]:
    """Return log-probabilities of answers under another policy, each of shape [token]."""
    answered = answers.answered
    first = np.unique(answers.query_of, return_index=True)[1]
    return Reference(policy.model, temperature=temperature).log_ref(
        [answered.queries[row].prompt_ids for row in first],
        [response.tokens for response in answered.responses],
        np.searchsorted(answers.query_of[first], answers.query_of),
    )


def _load(config: Config, name: str) -> Policy:
    device = torch.device(pick_device(config.device))
    return load_policy(name, config.model, device=device, dtype=getattr(torch, config.search.dtype))
