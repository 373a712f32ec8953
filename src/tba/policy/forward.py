"""The one way into a transformers model: hidden states out of its body, logits out of its head.

Tokens are packed: no padding goes in. What they attend to is said by an object
(`tba.policy.attention`). Index arrays are built on the CPU and moved once, so nothing waits for a
GPU.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tba.policy.attention import ATTENTION, Sequences


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


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


def raw_logits(
    model: PreTrainedModel, states: Float[Tensor, "*shape width"]
) -> Float[Tensor, "*shape vocabulary"]:
    """Run the head of the model and return logits in the precision it computes in."""
    raw = model.get_output_embeddings()(states)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return raw if cap is None else cap * torch.tanh(raw.float() / cap)
