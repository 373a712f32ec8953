"""Sentence embeddings by a plain encoder: the mean of its last states over the tokens of a text."""

from collections.abc import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModel, AutoTokenizer

from tba.errors import ModelError
from tba.records import Float32
from tba.runtimes.resources import pick_device

BATCH = 64


@torch.inference_mode()
def embed(texts: Sequence[str], name: str, device: str) -> Float32:
    """Return an embedding of each text; shape [text, width].

    Raises:
        ModelError: The encoder cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
        model = AutoModel.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"task.embedder {name} cannot be loaded ({str(error).splitlines()[0]}): give the "
            "folder or hub name of a sentence encoder, or leave it out"
        ) from error
    model = model.to(pick_device(device)).eval()
    parts = []
    for first in range(0, len(texts), BATCH):
        inputs = tokenizer(
            list(texts[first : first + BATCH]), padding=True, truncation=True, return_tensors="pt"
        ).to(model.device)
        states = model(**inputs).last_hidden_state  # [text, token, width]
        mask = inputs["attention_mask"].unsqueeze(-1)
        parts.append(((states * mask).sum(1) / mask.sum(1).clamp(min=1)).cpu().numpy())
    return np.concatenate(parts)
