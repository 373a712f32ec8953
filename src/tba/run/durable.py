"""Writing that survives a crash: a file is either the old one or the new one, never half of it."""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tba.errors import ConfigError, StorageError


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn a refused write inside the block into a `StorageError` that names `what`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise storage_error(what, error) from error


def storage_error(what: str, error: Exception) -> StorageError:
    """Return the one sentence that says why `what` could not be written, and what to do."""
    number = error.errno if isinstance(error, OSError) else None
    if from_rust := re.search(r"\(os error (\d+)\)", str(error)):  # how Rust libraries tell theirs
        number = int(from_rust[1])
    if number in (errno.ENOSPC, errno.EDQUOT):
        reason, remedy = "the disk is full", "free some space"
    else:
        reason = os.strerror(number) if number is not None else str(error)
        remedy = "repair the disk or the permissions"
    return StorageError(
        f"{what} could not be written ({reason}), but what was written before is intact: "
        f"{remedy}, then try again"
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


@contextmanager
def new_folder(out: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write to, which becomes `out` when the block ends, and else is removed.

    It is made at once, beside `out`: where nothing can be written, nothing is computed in vain.

    Raises:
        ConfigError: It cannot be made.
        StorageError: It cannot be written, or cannot become `out`.
    """
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a call that was killed
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{what} {out} cannot be made ({error.strerror}): name another folder"
        ) from error
    try:
        yield unfinished
        with storage_errors(f"{what} {out}"):
            unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the creations, renames and deletions inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
