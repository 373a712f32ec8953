"""Log-probabilities of responses, with gradient, and the hidden states behind them.

Prompts and responses go through the body as packed tokens (`tba.policy.packed`). The head runs at
the positions that predict a response token and nowhere else, in chunks that are computed again in
the backward pass: no float32 matrix of tokens times vocabulary outlives its chunk. The
end-of-sequence token is a response token like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tba.policy.forward import packed_states, raw_logits, to_device
from tba.policy.log_softmax import Chosen, choose, log_softmax_at
from tba.policy.packed import PackedSequences
from tba.records import Int32, Int64

_CHUNK_LOGITS = 2**25
"""Logits in one chunk of the head: 128 MiB in float32."""

_STRIP_LOGITS = 2**18
"""Logits whose softmax a CPU computes at a time: 1 MiB in float32, which its cache holds."""


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
        found = _predictions(model, prompts, responses, query_of_row)
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


def _predictions(
    model: PreTrainedModel,
    prompts: Sequence[Int32],
    responses: Sequence[Int32],
    query_of_row: Int64,
) -> _Predictions:
    """Run each prompt once, and all responses to it behind it."""
    inputs = [response[:-1] for response in responses]  # the last token predicts nothing
    packed = PackedSequences(prompts, inputs, query_of_row, model.device)
    hidden = packed_states(model, packed.ids, packed.positions, packed)[0]  # [token, width]
    of_inputs = np.array([len(row) for row in inputs])
    longest = int(of_inputs.max()) + 1
    row = np.repeat(np.arange(len(inputs)), of_inputs)
    place = np.arange(len(row)) - np.repeat(np.cumsum(of_inputs) - of_inputs, of_inputs)
    by_query = np.argsort(query_of_row, kind="stable")  # all rows of a query start in one state
    prompt_tokens = int(packed.prompt_end[-1])
    states = np.concatenate([packed.prompt_end - 1, np.arange(prompt_tokens, packed.tokens)])
    return _Predictions(
        hidden.index_select(0, to_device(states, hidden.device)),
        np.concatenate([query_of_row[by_query], len(prompts) + np.arange(len(row))]),
        np.concatenate([by_query * longest, row * longest + place + 1]),
        _prompt_means(hidden, packed.prompt_end),
    )


def _prompt_means(
    states: Float[Tensor, "token width"], prompt_end: Int64
) -> Float[Tensor, "query width"]:
    """Average the states of each prompt's own tokens."""
    lengths = np.diff(prompt_end, prepend=0)
    query = np.repeat(np.arange(len(lengths)), lengths)
    sums = states.new_zeros(len(lengths), states.shape[1], dtype=torch.float32)
    of_prompts = states[: prompt_end[-1]].float()
    sums = sums.index_add(0, to_device(query, states.device), of_prompts)
    return sums / to_device(lengths.astype(np.float32), states.device)[:, None]


def _log_probs_at(
    model: PreTrainedModel,
    found: _Predictions,
    tokens: Int64,
    temperature: float,
    eos_ids: Sequence[int],
) -> tuple[Float[Tensor, " prediction"], Float[Tensor, " prediction"]]:
    """Return log-probabilities of the tokens and of ending there, chunk by chunk of states."""
    states, device = found.states, found.states.device
    vocabulary = model.config.get_text_config().vocab_size
    size = max(1, _CHUNK_LOGITS // vocabulary)
    strip = max(1, _STRIP_LOGITS // vocabulary) if device.type == "cpu" else size
    stops = to_device(np.array(eos_ids, dtype=np.int64), device)
    starts = range(0, len(states), size)
    bounds = np.searchsorted(found.state_of_token, [*starts, len(states)])
    recompute = len(starts) > 1 and torch.is_grad_enabled()
    parts = []
    for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True):
        chosen = choose(found.state_of_token[first:last] - start, tokens[first:last], stops, strip)
        chunk = (model, states[start : start + size], chosen, temperature)
        if recompute:
            parts.append(checkpoint(_chunk, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(*chunk))
    of_tokens, of_stops = zip(*parts, strict=True)
    return torch.cat(of_tokens), torch.cat(of_stops)


def _chunk(
    model: PreTrainedModel,
    states: Float[Tensor, "state width"],
    chosen: Chosen,
    temperature: float,
) -> tuple[Float[Tensor, " prediction"], Float[Tensor, " prediction"]]:
    """Return log softmax(logits / temperature) at the tokens, and summed over the stop tokens."""
    return log_softmax_at(raw_logits(model, states), chosen, temperature)
