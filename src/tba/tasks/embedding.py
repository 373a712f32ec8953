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


class Embedder:
    """A sentence encoder."""

    def __init__(self, name: str, device: str) -> None:
        """Load it.

        Raises:
            ModelError: It cannot be loaded.
        """
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
            model = AutoModel.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"task.embedder {name} cannot be loaded ({str(error).splitlines()[0]}): give the "
                "folder or hub name of a sentence encoder, or leave it out"
            ) from error
        self._model = model.to(pick_device(device)).eval()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Float32:
        """Return an embedding of each text; shape [text, width]."""
        parts = []
        for first in range(0, len(texts), BATCH):
            own = list(texts[first : first + BATCH])
            inputs = self._tokenizer(own, padding=True, truncation=True, return_tensors="pt")
            inputs = inputs.to(self._model.device)
            states = self._model(**inputs).last_hidden_state  # [text, token, width]
            mask = inputs["attention_mask"].unsqueeze(-1)
            total = states.masked_fill(mask == 0, 0.0).sum(1)  # a text of no tokens has NaN
            parts.append((total / mask.sum(1).clamp(min=1)).cpu().numpy())
        return np.concatenate(parts)
