"""The default engine: plain PyTorch on a transformers model, quick at many samples of few queries.

The prompt is computed once for all samples of a query (`tba.policy.packed`), whose rows share its
keys and values (`tba.engines.decoding`); finished rows leave the batch; tokens are found by
inverting their distribution (`tba.engines.inverse_cdf`), from which their log-probabilities come.
A response is a function of weights, query and its own row of uniform numbers, drawn in advance:
when finished rows leave the batch cannot change which numbers the others get. On a GPU the pass
that appends a token is recorded once and replayed (`tba.engines.recording`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from tba.engines import linears
from tba.engines.base import Sampling
from tba.engines.decoding import DecodingSequences
from tba.engines.inverse_cdf import pick
from tba.engines.recording import Recording
from tba.policy.forward import packed_states, raw_logits, to_device
from tba.policy.packed import PromptPass, prompt_pass
from tba.records import FinishReason, Query, Response


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """When to look at the stop flags, and when to drop rows."""

    period: int
    """Tokens between two looks."""
    live_share: float
    """Rows are dropped once at most this share of them is unfinished."""


_RHYTHMS = {"cpu": _Rhythm(1, 0.8), "cuda": _Rhythm(8, 0.5)}
"""On a GPU looking means waiting for it, and fewer rows mean a new recording."""


class TorchEngine:
    """Generates with a transformers model held in this process; see `Engine` for the contract."""

    def __init__(self, model: PreTrainedModel, eos_ids: Sequence[int]) -> None:
        self._model = model.eval()
        vocabulary = model.get_output_embeddings().weight.shape[0]
        is_stop = np.zeros(vocabulary, dtype=np.bool_)
        is_stop[list(eos_ids)] = True
        self._is_stop = to_device(is_stop, model.device)

    @torch.inference_mode()
    def generate(
        self, queries: Sequence[Query], sampling: Sampling, generator: torch.Generator
    ) -> list[list[Response]]:
        """Sample `samples_per_query` responses for each query, in the order of the queries."""
        shape = (len(queries) * sampling.samples_per_query, sampling.max_completion_length)
        uniform = torch.rand(shape, generator=generator, device=generator.device)
        return self.generate_with(queries, sampling, uniform)

    @torch.inference_mode()
    def generate_with(
        self, queries: Sequence[Query], sampling: Sampling, uniform: Float[Tensor, "row token"]
    ) -> list[list[Response]]:
        """Sample with given random numbers from [0, 1): a row of them a response, query by query.

        So a response need not depend on which other queries are asked with its own.
        """
        samples, shape = sampling.samples_per_query, tuple(uniform.shape)
        uniform = uniform.to(self._model.device)  # [row, token]
        out = _Output(
            tokens=torch.zeros(shape, dtype=torch.long, device=uniform.device),
            log_mu=torch.zeros(shape, dtype=torch.float32, device=uniform.device),
        )
        prefix = prompt_pass(self._model, [query.prompt_ids for query in queries])
        rows = _Rows(self._model, prefix, uniform, sampling, stops=self._stops, out=out)
        rhythm = _RHYTHMS[uniform.device.type]
        for at in range(1, uniform.shape[1]):
            if at % rhythm.period == 0 and not rows.drop_finished(rhythm.live_share):
                break
            rows.append_token()
        responses = self._responses(out)
        return [responses[start : start + samples] for start in range(0, len(responses), samples)]

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live parameters by name, in a fixed order."""
        return dict(self._model.named_parameters())

    def refresh(self) -> None:
        """Derive the quick forms of the weights, where there are any, from the parameters."""
        linears.refresh(self._model)

    def _stops(self, row: Tensor, at: Tensor, token: Tensor) -> Tensor:
        """Whether a row ends with the token that it has at a place; the shapes broadcast."""
        return self._is_stop[token]

    def _responses(self, out: "_Output") -> list[Response]:
        """Cut each row after its first stop token."""
        rows, places = (torch.arange(size, device=out.tokens.device) for size in out.tokens.shape)
        stops = self._stops(rows[:, None], places, out.tokens).cpu().numpy()
        tokens = out.tokens.cpu().numpy().astype(np.int32)
        log_mu = out.log_mu.cpu().numpy()
        stopped = np.any(stops, axis=1)
        lengths = np.where(stopped, stops.argmax(axis=1) + 1, stops.shape[1]).tolist()
        return [
            Response(
                tokens=tokens[row, :length].copy(),
                log_mu=log_mu[row, :length].copy(),
                finish_reason=FinishReason.STOP if stopped[row] else FinishReason.LENGTH,
            )
            for row, length in enumerate(lengths)
        ]


@dataclass(frozen=True, slots=True)
class _Output:
    """What has been sampled for every row; after a row's first stop token it is noise."""

    tokens: Int[Tensor, "row token"]
    log_mu: Float[Tensor, "row token"]


class _Rows:
    """The rows still being generated: their newest tokens, and all that is needed to go on."""

    def __init__(
        self,
        model: PreTrainedModel,
        prefix: PromptPass,
        uniform: Float[Tensor, "row token"],
        sampling: Sampling,
        *,
        stops: Callable[[Tensor, Tensor, Tensor], Tensor],
        out: _Output,
    ) -> None:
        """Sample the first token of each row."""
        self._model = model
        self._uniform = uniform
        self._how = (sampling.temperature, sampling.top_p)
        self._stops = stops
        self._out = out
        self._sequences = DecodingSequences(prefix, sampling.samples_per_query, uniform.shape[1])
        self._at = torch.zeros(1, dtype=torch.long, device=uniform.device)  # of the token to come
        self._rows = torch.arange(len(uniform), device=uniform.device)
        self._recording = Recording(uniform.device)
        # All samples of a query share its first distribution: [query, sample] -> [row]
        first = uniform[:, 0].view(-1, sampling.samples_per_query)
        token, log_mu = pick(raw_logits(model, prefix.states), first, *self._how)
        self._token = token.flatten()
        self._done = torch.zeros_like(self._token, dtype=torch.bool)
        self._note(self._token, log_mu.flatten())

    def append_token(self) -> None:
        """Append one token to each row."""
        self._recording.run(self._pass, (len(self._rows), self._sequences.visible))
        self._sequences.advance()

    def drop_finished(self, live_share: float) -> bool:
        """Drop finished rows if they are many; return whether any is unfinished."""
        live = torch.nonzero(~self._done).squeeze(1)  # waits for the device
        if 0 < len(live) <= live_share * len(self._rows):
            self._rows, self._done, self._token = (
                part[live] for part in (self._rows, self._done, self._token)
            )
            self._sequences.keep(live)
        return len(live) > 0

    def _pass(self) -> None:
        """Compute one pass; all that changes is changed in place, and nothing is read back."""
        hidden = packed_states(
            self._model, self._token.unsqueeze(0), self._sequences.positions(), self._sequences
        )[0]
        numbers = self._uniform[self._rows, self._at].unsqueeze(1)
        token, log_mu = pick(raw_logits(self._model, hidden), numbers, *self._how)
        self._sequences.end_pass()
        self._token.copy_(token.squeeze(1))
        self._note(self._token, log_mu.squeeze(1))

    def _note(self, token: Int[Tensor, " row"], log_mu: Float[Tensor, " row"]) -> None:
        self._out.tokens[self._rows, self._at] = token
        self._out.log_mu[self._rows, self._at] = log_mu
        self._done |= self._stops(self._rows, self._at, token)
        self._at += 1
