"""Whether a model computes the same packed as it does by itself: what a new family may break.

Packed tokens go through a model's body and head (`tba.policy.forward`), not through its own
`forward`, which in some families does more: scales logits, or attends twice in a layer. Such a
model would be trained on wrong probabilities without a sign of it, so each is tried once.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tba.errors import ModelError
from tba.policy.forward import packed_states, raw_logits
from tba.policy.packed import PackedSequences, prompt_pass
from tba.records import Int32

_PROMPT, _ROWS = 5, (4, 2)
"""Tokens that are tried: a prompt, and two rows behind it."""
_TOLERANCE = 0.2
"""Error over spread of the log-probabilities; bfloat16 makes a few hundredths."""
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What a family raises that does not understand packed tokens."""
_STEP = 7919
"""A prime, by which the tried tokens spread over the vocabulary."""


@torch.no_grad()
def check_agreement(name: str, model: PreTrainedModel) -> None:
    """Refuse a model whose packed pass does not give the log-probabilities of its own forward pass.

    Raises:
        ModelError: It gives others, or none.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = (np.arange(1, _PROMPT + sum(_ROWS) + 1) * _STEP % vocabulary).astype(np.int32)
    prompt, *rows = np.split(ids, np.cumsum([_PROMPT, *_ROWS])[:-1])
    try:
        own = torch.cat([_own(model, np.concatenate([prompt, row])) for row in rows])
        packed = _packed(model, prompt, rows)
        prompt_pass(model, [prompt])
    except _FAILURES as failure:
        reason = next(iter(str(failure).strip().splitlines()), "no reason given")
        raise ModelError(
            f"The model {name} ({type(model).__name__}) cannot be computed on packed tokens "
            f"({type(failure).__name__}: {reason}): choose a model of another family."
        ) from failure
    error = (packed - own).square().mean().sqrt()
    spread = (own - own.mean(-1, keepdim=True)).square().mean().sqrt()
    if not error <= _TOLERANCE * spread:
        raise ModelError(
            f"The model {name} ({type(model).__name__}) has other log-probabilities on packed "
            f"tokens than by itself, by {error:.2g} nats on average, so its family does something "
            "that is not understood here: choose a model of another family."
        )


def _own(model: PreTrainedModel, ids: Int32) -> Float[Tensor, "token vocabulary"]:
    """Return the log-probabilities after each token by the model's own forward pass."""
    given = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    return model(input_ids=given, use_cache=False).logits[0].float().log_softmax(-1)


def _packed(
    model: PreTrainedModel, prompt: Int32, rows: list[Int32]
) -> Float[Tensor, "token vocabulary"]:
    """Return the same of a prompt that rows share, for each row from its prompt's first token."""
    packed = PackedSequences([prompt], rows, np.zeros(len(rows), dtype=np.int64), model.device)
    states = packed_states(model, packed.ids, packed.positions, packed)[0]
    found = raw_logits(model, states).float().log_softmax(-1)
    of_prompt, *of_rows = found.split([len(prompt), *map(len, rows)])
    return torch.cat([torch.cat([of_prompt, of_row]) for of_row in of_rows])
