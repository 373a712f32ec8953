"""`metrics.jsonl`: one JSON object a line, readable while the run writes it."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import numpy as np

from tba.records import Int64
from tba.run.durable import replace_file, storage_errors


class MetricsWriter:
    """Appends lines of scalars; each is on its way to the disk when `write` returns.

    A resumed run gives the step it goes on from: later lines, and a line torn by a crash, are
    removed first, so that no step is told twice.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self._path = path
        with self._storage_errors():
            if resumed_step is not None and path.exists():
                replace_file(path, _lines_until(path, resumed_step))
            self._file = path.open("ab", buffering=0)

    def write(
        self, step: int, scalars: Mapping[str, float], *, staleness: Int64 | None = None
    ) -> None:
        """Append one line: step, wall-clock time, scalars, and a histogram of the staleness.

        A number that is not finite becomes null, since JSON has no other word for it.

        Raises:
            StorageError: the disk refused the line.
        """
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: _finite(float(value)) for name, value in scalars.items()}
        if staleness is not None:
            line["staleness_histogram"] = staleness_histogram(staleness)
        rest = json.dumps(line, allow_nan=False).encode() + b"\n"
        with self._storage_errors():
            while rest:  # an unbuffered file may take less than it is given
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; the lines written so far stay."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _storage_errors(self) -> AbstractContextManager[None]:
        return storage_errors(f"metrics file {self._path}")


def last_step(path: Path) -> int:
    """Return the step of the last line that can be read; 0 where there is none."""
    if not path.exists():
        return 0
    steps = [json.loads(line)["step"] for line in _lines_until(path, sys.maxsize)]
    return int(steps[-1]) if steps else 0


def staleness_histogram(staleness: Int64) -> dict[str, int]:
    """Count samples by staleness in bins "0", "1", "2-3", "4-7" ... up to the largest."""
    assert staleness.min(initial=0) >= 0, "a sample cannot be newer than the trainer"
    # frexp gives the number of binary digits: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7 ...
    counts = np.bincount(np.frexp(staleness.astype(np.float64))[1])
    return {_bin_name(digits): int(count) for digits, count in enumerate(counts)}


def _bin_name(digits: int) -> str:
    low, high = 2**digits // 2, 2**digits - 1
    return str(low) if low == high else f"{low}-{high}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    """Yield the whole lines up to and including those of `step`."""
    with path.open("rb") as file:
        for line in file:
            try:
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    yield line
            except (ValueError, KeyError, TypeError):  # not a line of ours: torn or overwritten
                continue
