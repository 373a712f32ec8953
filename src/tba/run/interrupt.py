"""Ctrl-C, SIGTERM and SIGHUP end a run after its present step, and at once before the first one.

A second Ctrl-C ends it at once in any case.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Knows whether somebody asked the run to stop; listens in the main thread only."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.reason = ""
        """What asked for it; empty while nothing did."""
        self.stepping = False
        """Whether steps are being taken, so that there is something to save."""
        self._tell = tell
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        """Return whether the run is to stop."""
        return bool(self.reason)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = bool(self.reason) and number == signal.SIGINT
        self.reason = f"stopped by {signal.Signals(number).name}"
        if again or not self.stepping:
            raise KeyboardInterrupt
        self._tell(f"{self.reason}: ending after this step (Ctrl-C once more: at once)")
