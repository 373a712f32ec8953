"""The one way into a transformers model: hidden states out of its body, logits out of its head.

Prompts are padded on the left, so that what follows a prompt directly follows its last token in
every row. Padding is known from lengths, never from token ids: the padding token may well be the
end-of-sequence token. Index arrays are built on the CPU and moved once, so nothing waits for a GPU.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, PreTrainedModel

from tba.policy.attention import ATTENTION, Sequences
from tba.records import Int32


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def pad_left(prompts: Sequence[Int32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return token ids and where they are real, both of shape [query, prompt]."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    real = np.zeros((len(prompts), longest), dtype=np.bool_)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        real[row, longest - len(prompt) :] = True
    return ids, real


def prompt_states(
    model: PreTrainedModel, prompts: Sequence[Int32], cache: Cache
) -> Float[Tensor, "query token width"]:
    """Run prompts through the body and fill the cache; the last states predict first tokens."""
    ids, real = pad_left(prompts)
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    mask = None
    if not real.all():
        mask = attention_mask(model, to_device(real, model.device), queries=ids.shape[1])
    return hidden_states(
        model,
        to_device(ids, model.device),
        positions=to_device(positions, model.device),
        mask=mask,
        cache=cache,
    )


def hidden_states(
    model: PreTrainedModel,
    ids: Int[Tensor, "row token"],
    *,
    positions: Int[Tensor, "row token"],
    mask: Tensor | None,
    cache: Cache | None,
) -> Float[Tensor, "row token width"]:
    """Run the body of the model, without its head; a given cache is extended by the tokens."""
    body = model.base_model
    extra: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        extra[_cache_argument(type(body).forward)] = cache
    output = body(input_ids=ids, position_ids=positions, attention_mask=mask, **extra)
    return output.last_hidden_state


def packed_states(
    model: PreTrainedModel,
    ids: Int[Tensor, "1 token"],
    positions: Int[Tensor, "1 token"],
    sequences: Sequences,
) -> Float[Tensor, "1 token width"]:
    """Run the body of the model, without its head, over packed tokens."""
    assert model.config.get_text_config()._attn_implementation == ATTENTION
    unused = torch.empty(1, 1, 1, 1, device=ids.device)  # of no mask, transformers would make one
    output = model.base_model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=unused,
        use_cache=False,
        tba_sequences=sequences,
    )
    return output.last_hidden_state


@lru_cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the cache argument, which newer transformers have changed."""
    accepted = inspect.signature(forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def logits(
    model: PreTrainedModel, states: Float[Tensor, "*shape width"]
) -> Float[Tensor, "*shape vocabulary"]:
    """Run the head of the model and return float32 logits."""
    return raw_logits(model, states).float()


def raw_logits(
    model: PreTrainedModel, states: Float[Tensor, "*shape width"]
) -> Float[Tensor, "*shape vocabulary"]:
    """Run the head of the model and return logits in the precision it computes in."""
    raw = model.get_output_embeddings()(states)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return raw if cap is None else cap * torch.tanh(raw.float() / cap)


def attention_mask(
    model: PreTrainedModel, real: Bool[Tensor, "row key"], *, queries: int
) -> Tensor:
    """Return a mask with which the last `queries` of the keys attend, causally, to the real ones.

    A ready-made mask spares transformers its own, which would read from the GPU in each call.
    Padding attends to itself, so that no softmax is empty. Models that see a window only, and only
    once the keys exceed it, get the plain two-dimensional mask, from which transformers cuts the
    window.
    """
    config = model.config.get_text_config()
    spans = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    keys = real.shape[1]
    if any(span is not None and keys > span for span in spans):
        return real.long()
    key_at = torch.arange(keys, device=real.device)
    query_at = key_at[keys - queries :, None]
    seen = (real[:, None, None, :] & (key_at <= query_at)) | (key_at == query_at)
    if config._attn_implementation != "eager":
        return seen  # [row, 1, query, key]
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(seen.shape, dtype=model.dtype, device=real.device).masked_fill(~seen, lowest)
