"""Attention that knows which tokens belong together, as a transformers attention implementation.

A forward pass computes one packed row of tokens, [1, token], and says by an object what they are:
`Sequences`. All that is not attention works token by token and sees no padding; each layer's
attention is handed to that object. Families of transformers models that call their attention
through `AttentionInterface`, once a layer, work with it in their ordinary model class; whether one
does is tried as it is loaded (`tba.policy.agreement`). A pass without such an object, for instance
the model's own `generate`, gets transformers' "sdpa".
"""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tba.errors import ModelError

ATTENTION = "tba"


@runtime_checkable
class Sequences(Protocol):
    """What the packed tokens of one forward pass attend to."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 head token width"],
        key: Float[Tensor, "1 group token width"],
        value: Float[Tensor, "1 group token width"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "1 token head width"]:
        """Attend in one layer.

        Args:
            layer: Number of the layer.
            query: Of the new tokens; head h belongs to group h // (heads / groups).
            key: Of the new tokens, positions applied.
            value: Of the new tokens.
            scale: Multiplies the scores.
            window: A token sees itself and the `window` - 1 tokens before it; None: all.
        """
        ...


def register_attention() -> str:
    """Make the implementation known to transformers and return its name."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return ATTENTION


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tba_sequences: Sequences | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Hand one layer's attention to the sequences of this pass."""
    if tba_sequences is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("softcap", "s_aux"):  # of Gemma 2, of GPT-OSS
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} asks for attention with {name}, which is not supported: "
                "choose a model with plain attention"
            )
    scale = options.get("scaling")
    layer: Any = module.layer_idx
    attended = tba_sequences.attend(
        layer,
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=options.get("sliding_window"),
    )
    return attended, None
