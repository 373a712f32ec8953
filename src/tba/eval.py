"""`tba eval`: what a policy can do on held-out queries, and how far it is from its reference.

greedy pass@1      one response a query, the likeliest token each time
pass@k             without bias from n sampled responses a query (Chen et al., 2107.03374)
perplexity         exp(-mean log p_ref) over the response tokens sampled, without temperature
KL                 mean over responses of log pi - log p_ref, at the sampling temperature
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tba.config import Config
from tba.engines.base import Engine, Sampling
from tba.engines.torch_engine import TorchEngine
from tba.evaluation import answers, kl_to_reference, perplexity
from tba.policy.loading import Policy, check_positions, load_policy
from tba.policy.reference import Reference
from tba.records import Float32, Query, Response
from tba.run.checkpoint import load_newest
from tba.run.folder import RunFolder
from tba.runtimes.resources import pick_device
from tba.tasks import load_task
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
    greedy_pass_at_1: float
    """Share of queries whose likeliest response is correct."""
    pass_at: dict[int, float]
    """Chance by k that one of k sampled responses is correct."""
    mean_response_tokens: float
    """Mean length of the sampled responses, in tokens."""
    perplexity: float
    """Of the sampled responses under the reference."""
    kl: float
    """To the reference, in nats a response."""
    excluded: int
    """Responses whose reward failed."""

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values to read."""
        pass_at = [
            (f"pass@{k}, sampled", f"{100 * value:.1f} %") for k, value in self.pass_at.items()
        ]
        return [
            ("pass@1, greedy", f"{100 * self.greedy_pass_at_1:.1f} %"),
            *pass_at,
            ("samples a query", str(self.samples)),
            ("response tokens", f"{self.mean_response_tokens:.1f}"),
            ("perplexity under the reference", f"{self.perplexity:.3f}"),
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
    policy = _load(config, models.policy)
    task = load_task(config.task, policy.tokenizer)
    queries = task.test[: config.evaluation.queries]
    length, temperature = config.search.max_completion_length, config.search.temperature
    check_positions(policy.model, queries, length)
    engine = Recorder(TorchEngine(policy.model, policy.eos_ids))
    with Scorer(task.reward) as scorer:
        ask = partial(
            answers,
            scorer=scorer,
            queries=queries,
            tokenizer=policy.tokenizer,
            pass_threshold=task.pass_threshold,
            queries_per_batch=max(1, config.evaluation.queries_per_batch // samples),
            seed=config.seed,
        )
        greedy = ask(engine.engine, sampling=Sampling(1, 0.0, length))
        sampled = ask(engine, sampling=Sampling(samples, temperature, length))
    reference = policy if models.reference == models.policy else _load(config, models.reference)
    at_temperature = engine.log_probs_under(reference, temperature)
    untempered = at_temperature if temperature == 1 else engine.log_probs_under(reference, 1.0)
    return PolicyReport(
        policy=models.policy,
        reference=models.reference,
        queries=len(queries),
        samples=samples,
        greedy_pass_at_1=greedy.pass_at(1),
        pass_at={k: sampled.pass_at(k) for k in ks},
        mean_response_tokens=sampled.response_tokens / (len(queries) * samples),
        perplexity=perplexity(untempered),
        kl=kl_to_reference([response.log_mu for response in engine.responses], at_temperature),
        excluded=greedy.excluded + sampled.excluded,
    )


class Recorder:
    """An engine that remembers what it was asked and what it answered."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.queries: list[Query] = []
        self.responses: list[Response] = []
        """Those to the first query come first."""
        self._query_of_row: list[int] = []

    def generate(
        self, queries: Sequence[Query], sampling: Sampling, generator: torch.Generator
    ) -> list[list[Response]]:
        """Sample from the engine and keep the responses."""
        found = self.engine.generate(queries, sampling, generator)
        for query, responses in zip(queries, found, strict=True):
            self._query_of_row += [len(self.queries)] * len(responses)
            self.queries.append(query)
            self.responses += responses
        return found

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the engine's own."""
        return self.engine.weights()

    def refresh(self) -> None:
        """Have the engine look at its weights again."""
        self.engine.refresh()

    def log_probs_under(self, policy: Policy, temperature: float) -> list[Float32]:
        """Return log-probabilities of all responses under another policy, each of shape [token]."""
        return Reference(policy.model, temperature=temperature).log_ref(
            [query.prompt_ids for query in self.queries],
            [response.tokens for response in self.responses],
            np.array(self._query_of_row, dtype=np.int64),
        )


def _load(config: Config, name: str) -> Policy:
    device = torch.device(pick_device(config.device))
    return load_policy(name, config.model, device=device, dtype=getattr(torch, config.search.dtype))
