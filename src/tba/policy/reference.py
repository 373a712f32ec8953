"""The reference policy: log-probabilities without gradient, in micro-batches."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tba.policy.log_probs import response_outputs
from tba.records import Float32, Int32, Int64


class Reference:
    """A frozen model that says how likely it finds responses."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int = 16_384
    ) -> None:
        self._model = model
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live parameters by name, in a fixed order."""
        return dict(self._model.named_parameters())

    def log_ref(
        self, prompts: Sequence[Int32], responses: Sequence[Int32], query_of_row: Int64
    ) -> list[Float32]:
        """Return the log-probabilities of the tokens of each response, each of shape [token]."""
        return self._evaluate(prompts, responses, query_of_row, ())

    def log_stop(
        self,
        prompts: Sequence[Int32],
        responses: Sequence[Int32],
        query_of_row: Int64,
        eos_ids: Sequence[int],
    ) -> list[Float32]:
        """Return the log-probabilities of ending before each token, each of shape [token]."""
        return self._evaluate(prompts, responses, query_of_row, eos_ids)

    @torch.no_grad()
    def _evaluate(
        self,
        prompts: Sequence[Int32],
        responses: Sequence[Int32],
        query_of_row: Int64,
        eos_ids: Sequence[int],
    ) -> list[Float32]:
        """Return the log-probabilities of each token or, with stop tokens given, of those."""
        found: list[Float32] = [np.empty(0, dtype=np.float32)] * len(responses)
        lengths = np.array([len(response) for response in responses])
        for queries in self._micro_batches(prompts, lengths, query_of_row):
            rows = np.flatnonzero(np.isin(query_of_row, queries)).tolist()
            outputs = response_outputs(
                self._model,
                [prompts[query] for query in queries],
                [responses[row] for row in rows],
                np.searchsorted(queries, query_of_row[rows]),
                temperature=self._temperature,
                eos_ids=eos_ids,
            )
            log_probs = outputs.log_stop if eos_ids else outputs.log_pi
            for row, values in zip(rows, log_probs.cpu().numpy(), strict=True):
                found[row] = values[: lengths[row]].copy()
        return found

    def _micro_batches(
        self, prompts: Sequence[Int32], lengths: Int64, query_of_row: Int64
    ) -> list[list[int]]:
        """Cut the queries that have rows into runs of at least one, within the token budget."""
        runs: list[list[int]] = []
        spent = 0
        for query in np.unique(query_of_row).tolist():
            cost = len(prompts[query]) + int((lengths[query_of_row == query] - 1).sum())
            if not runs or spent + cost > self._micro_batch_tokens:
                runs.append([])
                spent = 0
            runs[-1].append(query)
            spent += cost
        return runs
