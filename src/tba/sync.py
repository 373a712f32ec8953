"""The weights' wire: versions and content hashes through memory that trainer and searchers share.

    Trainer --publish(weights, version)--> [slot 0 | slot 1] + header --pull--> Searcher

* `publish` stops the trainer for one copy of the weights; the hash is computed in a thread
  afterwards, and the header, which makes the new slot the current one, is written last.
* `pull` copies the current slot into the engine's own parameters and hashes those parameters. Only
  when that hash is the header's may a sample be tagged with the version. A slot that was
  overwritten meanwhile, or any damage, shows as a mismatch: it is logged and the weights are taken
  again.
* The hash covers the version as well as the bytes, so that neither can be mistaken for another. It
  is XXH3 with 128 bits, which takes an eighth of SHA-256's time: it guards against accidents, and
  whoever could forge weights in this memory could forge their hash beside them.

The trajectories' wire is `tba.run.rollouts` (what crosses) and `tba.runtimes` (how).
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_128

from tba.errors import WaitTimeoutError

log = logging.getLogger(__name__)

SLOTS = 2
ALIGNMENT = 64  # bytes; every dtype can be viewed at such an offset
NOTHING_PUBLISHED = -1
MAX_PULLS = 20
DIGEST_WORDS = 2  # of 8 bytes


def digest_of(weights: Mapping[str, Tensor], version: int) -> bytes:
    """Return the XXH3-128 of a version number and of all weights' bytes, in their order.

    Other threads run meanwhile: hashing holds Python's lock for small weights only.
    """
    xxh = xxh3_128(version.to_bytes(8, "little", signed=True))
    for weight in weights.values():
        data = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        xxh.update(data.numpy().data)
    return xxh.digest()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each weight lies within a slot."""

    shapes: dict[str, torch.Size]
    """Shape of each weight, by name."""
    dtype: torch.dtype
    """Precision in which weights travel."""

    def views(self, slot: Tensor) -> dict[str, Tensor]:
        """Return the weights of a slot (bytes) as views of their shape and dtype."""
        views, offset = {}, 0
        for name, shape in self.shapes.items():
            size = shape.numel() * self.dtype.itemsize
            views[name] = slot[offset : offset + size].view(self.dtype).view(shape)
            offset += _aligned(size)
        return views

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return sum(_aligned(shape.numel() * self.dtype.itemsize) for shape in self.shapes.values())


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT) * ALIGNMENT


class WeightStore:
    """Two slots of shared memory and a header: [version, slot, digest as 2 words].

    One trainer publishes, any number of searchers pull. The store is picklable for
    `torch.multiprocessing`, which passes the memory itself; it vanishes with its last holder.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._layout = Layout({name: w.shape for name, w in weights.items()}, dtype)
        self._slots = torch.zeros(SLOTS, self._layout.nbytes, dtype=torch.uint8).share_memory_()
        self._header = torch.full(
            (2 + DIGEST_WORDS,), NOTHING_PUBLISHED, dtype=torch.int64
        ).share_memory_()
        self._hashing: threading.Thread | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the hashing thread behind: it belongs to the publishing process."""
        return {**self.__dict__, "_hashing": None}

    @property
    def version(self) -> int:
        """The newest version whose hash is known, or -1."""
        return int(self._header[0])

    def room(self, device: torch.device) -> dict[str, Tensor]:
        """Return zeros of the shapes and dtype of the weights that travel, by name."""
        layout = self._layout
        return {
            name: torch.zeros(shape, dtype=layout.dtype, device=device)
            for name, shape in layout.shapes.items()
        }

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy the weights into the free slot and return; they become current once they are hashed.

        Args:
            weights: The trainer's weights, named as those the store was made for.
            version: Optimiser steps behind them.
        """
        self.flush()
        slot = 1 - int(self._header[1]) if self.version != NOTHING_PUBLISHED else 0
        views = self._layout.views(self._slots[slot])
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(weights[name])
        self._hashing = threading.Thread(
            target=self._make_current, args=(slot, version, views), daemon=True
        )
        self._hashing.start()

    def flush(self) -> None:
        """Return when what was last published is current: at most the time of one hash."""
        if self._hashing is not None:
            self._hashing.join()
            self._hashing = None

    def pull(self, into: Mapping[str, Tensor], newer_than: int) -> int | None:
        """Copy weights newer than a version into an engine's parameters; prove that they arrived.

        Returns:
            The version now held, or None when there is no newer one.

        Raises:
            WaitTimeoutError: The hash did not match `MAX_PULLS` times in a row.
        """
        for attempt in range(MAX_PULLS):
            version, slot, *digest = self._header.tolist()
            if version <= newer_than:
                return None
            with torch.no_grad():
                for name, view in self._layout.views(self._slots[slot]).items():
                    into[name].copy_(view)
            if _words(digest_of(into, version)) == digest:
                return version
            log.warning("weights of version %d do not match their hash; taking them again", version)
            time.sleep(0.01 * attempt)
        raise WaitTimeoutError(
            f"the weights in shared memory did not match their hash {MAX_PULLS} times in a row; "
            "the memory is "
            "damaged or weights are published faster than they can be copied: raise sync.sync_every"
        )

    def _make_current(self, slot: int, version: int, views: Mapping[str, Tensor]) -> None:
        digest = _words(digest_of(views, version))
        self._header[1:] = torch.tensor([slot, *digest])
        self._header[0] = version


def _words(digest: bytes) -> list[int]:
    return [
        int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True)
        for i in range(DIGEST_WORDS)
    ]
