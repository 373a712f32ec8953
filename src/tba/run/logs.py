"""Logs of a run's processes, and warnings to whoever watches it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tba.run.durable import storage_errors


class _LogFile(logging.FileHandler):
    """A log whose own trouble, such as a full disk, never hides that of the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the record."""

    def close(self) -> None:
        """Close the file, whatever is left unwritten."""
        with suppress(OSError):
            super().close()


class _Teller(logging.Handler):
    """Shows warnings to whoever watches the run."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning, without its traceback."""
        self._tell(record.getMessage().splitlines()[0])


@contextmanager
def log_to(file: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Write everything this package logs to a file, and show its warnings."""
    with storage_errors(f"log {file}"):
        in_file = _LogFile(file)
    in_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = (in_file, _Teller(tell))
    logger = logging.getLogger("tba")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
