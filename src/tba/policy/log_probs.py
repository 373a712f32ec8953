"""Log-probabilities of responses, with gradient, and the hidden states behind them.

The prompt of a query is computed once for all its rows: its keys and values, gradient included,
are handed to each row, and only response tokens follow. The head runs at the positions that predict
a response token and nowhere else, in chunks that are computed again in the backward pass: no
float32 matrix of tokens times vocabulary outlives its chunk. The end-of-sequence token is a
response token like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from tba.policy.forward import attention_mask, hidden_states, logits, prompt_states, to_device
from tba.records import Int32, Int64

_CHUNK_LOGITS = 2**25
"""Logits in one chunk of the head: 128 MiB in float32."""

_FORWARD_TOKENS = 512
"""Padding that costs about as much as one more forward pass, in tokens."""


@dataclass(frozen=True, slots=True)
class _Predictions:
    """Which hidden state predicts which response token."""

    states: Float[Tensor, "state width"]
    state_of_token: Int64
    """Not decreasing; shape [prediction]."""
    slot: Int64
    """row * longest response + position in the response; shape [prediction]."""
    prompt_means: Float[Tensor, "query width"]
    """Mean of the hidden states over each prompt."""


@dataclass(frozen=True, slots=True)
class ResponseOutputs:
    """What one pass of a policy over prompts and responses gives, with gradient."""

    log_pi: Float[Tensor, "row token"]
    """Float32 log-probability of each response token, zero at padding."""
    mask: Bool[Tensor, "row token"]
    """Where there is a response token."""
    log_stop: Float[Tensor, "row token"]
    """Float32 log-probability of ending the response in the place of each token, zero at padding
    and where no end-of-sequence ids were given."""
    _found: _Predictions

    def states(self) -> Float[Tensor, "row token width"]:
        """Return the hidden state that predicts each token, zero at padding."""
        states = self._found.states
        at, slot = (
            to_device(a, states.device) for a in (self._found.state_of_token, self._found.slot)
        )
        padded = states.new_zeros(self.mask.numel(), states.shape[1])
        return padded.index_copy(0, slot, states[at]).view(*self.mask.shape, -1)

    def prompt_means(self) -> Float[Tensor, "query width"]:
        """Return the mean hidden state over each prompt."""
        return self._found.prompt_means


def response_outputs(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    responses: Sequence[Int32],
    query_of_row: Int64,
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
    eos_ids: Sequence[int] = (),
) -> ResponseOutputs:
    """Run the policy over responses, each behind the prompt of its query.

    Args:
        model: The policy or the reference.
        prompts: One for each query, none of them empty.
        responses: One for each row, none of them empty.
        query_of_row: Position in `prompts` of each row's query; each query has a row.
        temperature: Divides the logits.
        autocast: Precision of the forward pass, if lower than that of the weights.
        eos_ids: Tokens that end a response, for `log_stop`.
    """
    lengths = np.array([len(response) for response in responses])
    mask = np.arange(lengths.max()) < lengths[:, None]  # [row, token]
    tokens = np.zeros(mask.shape, dtype=np.int64)
    tokens[mask] = np.concatenate(responses)
    with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
        if _recomputes_layers(model):
            found = _full_row_predictions(model, prompts, responses, query_of_row)
        else:
            found = _shared_prompt_predictions(model, prompts, tokens, lengths, query_of_row)
        tokens_and_stops = _log_probs_at(
            model, found, tokens.reshape(-1)[found.slot], temperature, eos_ids
        )
    slot = to_device(found.slot, model.device)
    log_pi, log_stop = (
        flat.new_zeros(mask.size).index_copy(0, slot, flat).view(mask.shape)
        for flat in tokens_and_stops
    )
    return ResponseOutputs(log_pi, to_device(mask, model.device), log_stop, found)


def response_log_probs(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    responses: Sequence[Int32],
    query_of_row: Int64,
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
) -> tuple[Float[Tensor, "row token"], Bool[Tensor, "row token"]]:
    """Return `log_pi` and `mask` of `response_outputs`."""
    outputs = response_outputs(
        model, prompts, responses, query_of_row, temperature=temperature, autocast=autocast
    )
    return outputs.log_pi, outputs.mask


def full_row_log_probs(
    model: PreTrainedModel, prompts: Sequence[Int32], responses: Sequence[Int32]
) -> Float[Tensor, " token"]:
    """Return the log-probabilities of response tokens, row after row, each with its own prompt."""
    found = _full_row_predictions(model, prompts, responses, np.arange(len(responses)))
    return _log_probs_at(model, found, np.concatenate(responses).astype(np.int64), 1.0, ())[0]


def _shared_prompt_predictions(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    tokens: Int64,
    lengths: Int64,
    query_of_row: Int64,
) -> _Predictions:
    """Run each prompt once and let all responses to it follow."""
    longest = tokens.shape[1]
    cache = DynamicCache()
    by_query = np.argsort(query_of_row, kind="stable")
    of_prompts = prompt_states(model, prompts, cache)
    states = [of_prompts[:, -1]]  # each predicts the first token of several rows
    state_of_token = [query_of_row[by_query]]
    slots = [by_query * longest]
    known = len(prompts)
    for rows in _length_buckets(lengths):
        inputs = lengths[rows] - 1  # the last token predicts nothing
        filled = np.arange(inputs.max()) < inputs[:, None]
        hidden = _continue(model, prompts, cache, tokens[rows], inputs, query_of_row[rows])
        row, token = np.nonzero(filled)
        at = to_device(np.flatnonzero(filled), hidden.device)
        states.append(
            hidden.flatten(0, 1).index_select(0, at)
        )  # [row, token, width] -> [state, width]
        state_of_token.append(known + np.arange(len(row)))
        slots.append(rows[row] * longest + token + 1)
        known += len(row)
    return _Predictions(
        torch.cat(states),
        np.concatenate(state_of_token),
        np.concatenate(slots),
        _prompt_means(of_prompts, prompts, padded_left=True),
    )


def _continue(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    cache: DynamicCache,
    tokens: Int64,
    inputs: Int64,
    query_of_row: Int64,
) -> Float[Tensor, "row token width"]:
    """Run the first `inputs` tokens of each row on top of the cache of its prompt."""
    longest_prompt, count = cache.get_seq_length(), int(inputs.max())
    prompt_lengths = np.array([len(prompt) for prompt in prompts])[query_of_row]
    # Padding repeats the last position, so that none lies beyond a table of learned positions.
    offsets = np.minimum(np.arange(count), inputs[:, None] - 1)
    real = np.arange(longest_prompt + count) >= longest_prompt - prompt_lengths[:, None]
    device = model.device
    at = to_device(query_of_row, device)
    branch = DynamicCache()
    for index, layer in enumerate(cache.layers):
        branch.update(layer.keys.index_select(0, at), layer.values.index_select(0, at), index)
    return hidden_states(
        model,
        to_device(tokens[:, :count], device),
        positions=to_device(prompt_lengths[:, None] + offsets, device),
        mask=attention_mask(model, to_device(real, device), queries=count),
        cache=branch,
    )


def _full_row_predictions(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    responses: Sequence[Int32],
    query_of_row: Int64,
) -> _Predictions:
    """Run each row with its own prompt, without a cache: all that gradient checkpointing allows."""
    own_prompts = [prompts[query] for query in query_of_row]
    rows = [np.concatenate(pair) for pair in zip(own_prompts, responses, strict=True)]
    width = max(len(row) for row in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for slot, row in zip(ids, rows, strict=True):
        slot[: len(row) - 1] = row[:-1]  # padding on the right is hidden by causality
    real = np.arange(width) < np.array([len(row) - 1 for row in rows])[:, None]
    positions = np.where(real, np.arange(width), 0)
    starts = np.array([len(prompt) for prompt in own_prompts]) - 1
    lengths = np.array([len(response) for response in responses])
    of_row, token = np.nonzero(np.arange(lengths.max()) < lengths[:, None])
    hidden = hidden_states(
        model,
        to_device(ids, model.device),
        positions=to_device(positions, model.device),
        mask=attention_mask(model, to_device(real, model.device), queries=width),
        cache=None,
    )
    at = to_device(of_row * width + starts[of_row] + token, hidden.device)
    states = hidden.flatten(0, 1).index_select(0, at)  # [row, token, width] -> [state, width]
    _, first_row = np.unique(query_of_row, return_index=True)
    of_prompts = hidden.index_select(0, to_device(first_row, hidden.device))
    return _Predictions(
        states,
        np.arange(len(of_row)),
        of_row * lengths.max() + token,
        _prompt_means(of_prompts, prompts, padded_left=False),
    )


def _prompt_means(
    states: Float[Tensor, "query token width"], prompts: Sequence[Int32], *, padded_left: bool
) -> Float[Tensor, "query width"]:
    """Average the states of each prompt's own tokens, the first or the last of its row."""
    lengths = np.array([len(prompt) for prompt in prompts])[:, None]
    at = np.arange(states.shape[1])
    own = at >= states.shape[1] - lengths if padded_left else at < lengths
    weights = to_device((own / lengths).astype(np.float32), states.device)
    return torch.einsum("qt,qtw->qw", weights.to(states.dtype), states)


def _recomputes_layers(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing is at work, under which transformers fills no cache."""
    active = model.training and torch.is_grad_enabled()
    return active and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def _length_buckets(lengths: Int64) -> list[Int64]:
    """Group the rows longer than one token so that little padding is computed, in few groups."""
    rows = np.argsort(-lengths, kind="stable")
    rows = rows[lengths[rows] > 1]
    buckets = []
    while len(rows):
        longest = lengths[rows[0]]
        half = int(np.searchsorted(-lengths[rows], -longest / 2))
        worth_it = (len(rows) - half) * longest / 2 > _FORWARD_TOKENS
        cut = half if worth_it else len(rows)
        buckets.append(rows[:cut])
        rows = rows[cut:]
    return buckets


def _log_probs_at(
    model: PreTrainedModel,
    found: _Predictions,
    tokens: NDArray[np.int64],
    temperature: float,
    eos_ids: Sequence[int],
) -> tuple[Float[Tensor, " prediction"], Float[Tensor, " prediction"]]:
    """Return log-probabilities of the tokens and of ending there, chunk by chunk of states."""
    states = found.states
    size = max(1, _CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    starts = range(0, len(states), size)
    bounds = np.searchsorted(found.state_of_token, [*starts, len(states)])
    state_of_token = to_device(found.state_of_token, states.device)
    token = to_device(tokens, states.device)
    recompute = len(starts) > 1 and torch.is_grad_enabled()
    parts = []
    for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True):
        chunk = (
            model,
            states[start : start + size],
            state_of_token[first:last] - start,
            token[first:last],
            temperature,
            eos_ids,
        )
        if recompute:
            parts.append(checkpoint(_chunk, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(*chunk))
    of_tokens, of_stops = zip(*parts, strict=True)
    return torch.cat(of_tokens), torch.cat(of_stops)


def _chunk(
    model: PreTrainedModel,
    states: Float[Tensor, "state width"],
    state_of_token: Int[Tensor, " prediction"],
    token: Int[Tensor, " prediction"],
    temperature: float,
    eos_ids: Sequence[int],
) -> tuple[Float[Tensor, " prediction"], Float[Tensor, " prediction"]]:
    """Return log softmax(logits / temperature) at the tokens, and summed over the stop tokens."""
    scaled = logits(model, states) / temperature  # [state, vocabulary]
    total = scaled.logsumexp(dim=-1)[state_of_token]
    of_token = scaled[state_of_token, token] - total
    if not eos_ids:
        return of_token, torch.zeros_like(of_token)
    stops = torch.stack([scaled[:, eos] for eos in eos_ids], dim=-1)  # [state, stop token]
    return of_token, stops.logsumexp(dim=-1)[state_of_token] - total
