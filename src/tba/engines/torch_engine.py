"""The default engine: plain PyTorch on a transformers model, quick at many samples of few queries.

The prompt is computed once a query and its keys and values copied to each sample; finished rows
leave the batch; the log-probability of what is sampled is taken from the very distribution sampled
from. A response is a function of weights, query and its own row of uniform numbers, drawn in
advance: when finished rows leave the batch cannot change which numbers the others get.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer, PreTrainedModel

from tba.engines.base import Sampling
from tba.policy.forward import attention_mask, hidden_states, logits, prompt_states, to_device
from tba.records import FinishReason, Query, Response

_FLAG_PERIOD_GPU = 8
"""Tokens between two looks at the stop flags on a GPU, where looking means waiting for it."""

_LIVE_SHARE = 0.8
"""Rows are dropped once at most this share of them is unfinished."""


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
        count, samples = len(queries), sampling.samples_per_query
        shape = (count * samples, sampling.max_completion_length)
        uniform = torch.rand(shape, generator=generator, device=generator.device)
        uniform = uniform.to(self._model.device)  # [row, token]
        out = _Output(
            tokens=torch.zeros(shape, dtype=torch.long, device=uniform.device),
            log_mu=torch.zeros(shape, dtype=torch.float32, device=uniform.device),
        )
        self._fill(out, [query.prompt_ids for query in queries], uniform, sampling)
        responses = self._responses(out)
        return [responses[start : start + samples] for start in range(0, len(responses), samples)]

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live parameters by name, in a fixed order."""
        return dict(self._model.named_parameters())

    def _fill(
        self,
        out: "_Output",
        prompts: Sequence[np.ndarray],
        uniform: Float[Tensor, "row token"],
        sampling: Sampling,
    ) -> None:
        """Generate token by token until every row has stopped or is full."""
        temperature, samples = sampling.temperature, sampling.samples_per_query
        prompt_cache = DynamicCache()
        states = prompt_states(self._model, prompts, prompt_cache)[:, -1]
        # All samples of a query share its first distribution: [query, sample] -> [row]
        first = uniform[:, 0].view(len(prompts), samples)
        token, log_mu = (
            part.flatten() for part in _pick(logits(self._model, states), first, temperature)
        )
        live = _Live.start(prompts, samples, prompt_cache, uniform.shape[1], uniform.device)
        period = _FLAG_PERIOD_GPU if uniform.device.type == "cuda" else 1
        for at in range(uniform.shape[1]):
            if at > 0:
                hidden = live.step(self._model, token)
                scores = logits(self._model, hidden)
                picked = _pick(scores, uniform[live.rows, at].unsqueeze(1), temperature)
                token, log_mu = (part.squeeze(1) for part in picked)
            out.tokens[live.rows, at] = token
            out.log_mu[live.rows, at] = log_mu
            live.done |= self._is_stop[token]
            if (at + 1) % period == 0:
                unfinished = torch.nonzero(~live.done).squeeze(1)  # waits for the device
                if len(unfinished) == 0:
                    return
                if len(unfinished) <= _LIVE_SHARE * len(live.rows):
                    live.keep(unfinished)
                    token = token[unfinished]

    def _responses(self, out: "_Output") -> list[Response]:
        """Cut each row after its first stop token."""
        stops = self._is_stop[out.tokens].cpu().numpy()
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


class _InPlaceLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer with room to spare: a new token is written, nothing copied."""

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        super().__init__()
        self.keys, self.values, self.used = keys, values, used
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values and return all there are."""
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Return how many tokens are held."""
        return self.used

    def take(self, rows: Int[Tensor, " row"], capacity: int) -> "_InPlaceLayer":
        """Return a copy of some rows with room for `capacity` tokens."""
        keys, values = (
            _room(full[:, :, : self.used], rows, capacity) for full in (self.keys, self.values)
        )
        return _InPlaceLayer(keys, values, self.used)


def _room(full: Tensor, rows: Int[Tensor, " row"], capacity: int) -> Tensor:
    """Copy rows of [row, head, token, width] to the front of memory for `capacity` tokens."""
    held = full.shape[2]
    wide = full.new_empty(len(rows), full.shape[1], capacity, full.shape[3])
    torch.index_select(full, 0, rows, out=wide[:, :, :held])
    return wide


class _Live:
    """The rows still being generated, and all that the model needs to go on with them."""

    def __init__(
        self, rows: Tensor, real: Bool[Tensor, "row key"] | None, positions: Tensor, cache: Cache
    ) -> None:
        self.rows = rows
        """Row of the output that each one fills; shape [row]."""
        self.done = torch.zeros_like(rows, dtype=torch.bool)
        """Whether it has stopped; shape [row]."""
        self._real = real
        self._positions = positions  # of the token to come, [row]
        self._cache = cache

    @classmethod
    def start(
        cls,
        prompts: Sequence[np.ndarray],
        samples: int,
        prompt_cache: DynamicCache,
        tokens: int,
        device: torch.device,
    ) -> "_Live":
        """Copy the cache of each prompt to its samples."""
        lengths = np.array([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        query_of_row = np.repeat(np.arange(len(prompts)), samples)
        at = to_device(query_of_row, device)
        layers = [
            _InPlaceLayer(layer.keys, layer.values, longest).take(at, longest + tokens)
            for layer in prompt_cache.layers
        ]
        real = None
        if lengths.min() < longest:
            padded = np.arange(longest + tokens) >= longest - lengths[query_of_row][:, None]
            real = to_device(padded, device)
        positions = to_device(lengths[query_of_row], device)
        return cls(torch.arange(len(at), device=device), real, positions, Cache(layers=layers))

    def step(
        self, model: PreTrainedModel, token: Int[Tensor, " row"]
    ) -> Float[Tensor, "row width"]:
        """Append one token to each row and return the states that predict the next."""
        mask = None
        if self._real is not None:
            held = self._cache.get_seq_length() + 1
            mask = attention_mask(model, self._real[:, :held], queries=1)
        hidden = hidden_states(
            model,
            token.unsqueeze(1),
            positions=self._positions.unsqueeze(1),
            mask=mask,
            cache=self._cache,
        )
        self._positions = self._positions + 1
        return hidden.squeeze(1)

    def keep(self, rows: Int[Tensor, " row"]) -> None:
        """Drop all rows but the given ones."""
        self.rows, self.done = self.rows[rows], self.done[rows]
        self._positions = self._positions[rows]
        self._real = None if self._real is None else self._real[rows]
        layers = [layer.take(rows, layer.keys.shape[2]) for layer in self._cache.layers]
        self._cache = Cache(layers=layers)


def _pick(
    scores: Float[Tensor, "group vocabulary"],
    uniform: Float[Tensor, "group sample"],
    temperature: float,
) -> tuple[Int[Tensor, "group sample"], Float[Tensor, "group sample"]]:
    """Return tokens and their log-probabilities, by inverting the cumulative distribution."""
    if temperature == 0:
        log_probs = scores.log_softmax(dim=-1)
        token = scores.argmax(dim=-1, keepdim=True).expand(uniform.shape)
    else:
        log_probs = (scores / temperature).log_softmax(dim=-1)
        cumulative = log_probs.exp().cumsum(dim=-1)
        # The product stays below the last entry, so a token without probability is never found.
        token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        token = token.clamp(max=scores.shape[1] - 1)  # a diverged policy's NaN is found nowhere
    return token, log_probs.gather(1, token)
