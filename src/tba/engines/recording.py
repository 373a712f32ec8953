"""One pass of work on a GPU, recorded as a CUDA graph and replayed: no launches one by one."""

from collections.abc import Callable, Hashable

import torch


class Recording:
    """Runs the same work again and again; on a GPU from a recording, wherever there is one.

    The work reads and writes fixed tensors, allocates what it likes, and waits for nothing. Its
    shapes are named by a key: a new key means a new recording. The first run is not recorded, since
    libraries set themselves up in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._records = device.type == "cuda"
        self._warm = False
        self._key: Hashable = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, work: Callable[[], None], key: Hashable) -> None:
        """Do the work once; it is not kept, so that it may belong to whoever holds this."""
        if not (self._records and self._warm):
            work()
            self._warm = True
            return
        if self._graph is None or key != self._key:
            self._graph = torch.cuda.CUDAGraph()
            self._key = key
            # a recording is of the current GPU's stream, and a searcher's need not be the first GPU
            with torch.cuda.device(self._device), torch.cuda.graph(self._graph):
                work()
        self._graph.replay()
