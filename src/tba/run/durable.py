"""Writing that survives a crash: a file is either the old one or the new one, never half of it."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tba.errors import StorageError


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn a refused write inside the block into a `StorageError` that names `what`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise storage_error(what, error) from error


def storage_error(what: str, error: Exception) -> StorageError:
    """Return the one sentence that says why `what` could not be written, and what to do."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{what} could not be written because the disk is full: free some space, then resume "
            "(what was written before is intact)"
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return StorageError(
        f"{what} could not be written ({reason}): make room or change the permissions, then resume "
        "(what was written before is intact)"
    )


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write the chunks to `path` in one atomic, durable step."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the creations, renames and deletions inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
