"""The rollouts of a run: an append-only columnar log, one trajectory per row.

The file is a plain Arrow IPC stream without its end marker, so `pyarrow.ipc.open_stream` and
dataframe tools read it as it is. It is the buffer's durable form: `append` returns after the bytes
are on disk, and adding all batches in order to an empty buffer rebuilds it. The metadata of each
batch carries a checksum of its body, by which a tail torn by a crash is found and cut off.

What crosses from a searcher is such a batch already, checksum included, so that the trainer's
process, whose time is the dearest, writes down the very bytes that arrive.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tba.errors import RunFolderError, StorageError
from tba.records import GIVEN, FinishReason, Float32, Int64, Outcome, Score, Trajectory

SCHEMA = pa.schema(
    [
        ("query_id", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("log_mu", pa.list_(pa.float32())),
        ("log_ref", pa.list_(pa.float32())),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("detail", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("reference_version", pa.int64()),
        ("ticket", pa.int64()),
        ("searcher", pa.int64()),
        ("temperature", pa.float64()),
        ("extras", pa.map_(pa.string(), pa.list_(pa.float32()))),
    ]
)
_HEADER: bytes = SCHEMA.serialize().to_pybytes()
# For columns as small as these, handing them to Arrow's threads takes longer than the work itself.
_WRITE_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_NO_CHECKSUM = b"crc32:........"


def encode(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Turn trajectories into a record batch of `SCHEMA`."""
    columns: dict[str, Any] = {
        name: [getattr(t, name) for t in trajectories]
        for name in SCHEMA.names
        if name not in ("outcome", "reward", "detail")
    }
    columns["outcome"] = [t.score.outcome.value for t in trajectories]
    columns["reward"] = [t.score.reward for t in trajectories]
    columns["detail"] = [t.score.detail for t in trajectories]
    columns["finish_reason"] = [t.finish_reason.value for t in trajectories]
    columns["extras"] = [list(t.extras.items()) for t in trajectories]
    arrays = [
        _list_array(columns[field.name], field.type)
        if pa.types.is_list(field.type)
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def decode(batch: pa.RecordBatch) -> list[Trajectory]:
    """Turn a record batch of `SCHEMA` back into trajectories with read-only views of it."""
    columns: dict[str, Any] = {
        field.name: _split(*flatten(batch[field.name]))
        if pa.types.is_list(field.type)
        else batch[field.name].to_pylist()
        for field in SCHEMA
    }
    columns["extras"] = [
        {name: np.array(values, dtype=np.float32) for name, values in extras}
        for extras in columns["extras"]
    ]
    columns["finish_reason"] = [FinishReason(reason) for reason in columns["finish_reason"]]
    columns["score"] = [
        Score(Outcome(outcome), reward, detail)
        for outcome, reward, detail in zip(
            columns.pop("outcome"), columns.pop("reward"), columns.pop("detail"), strict=True
        )
    ]
    return [
        Trajectory(**dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def is_given(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Say of each row whether it was given with the task instead of searched."""
    return pc.equal(batch["searcher"], GIVEN)


def flatten(column: pa.ListArray) -> tuple[NDArray[Any], Int64]:
    """Return a list column's values end to end and the n + 1 offsets that bound its rows."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]


def extra(batch: pa.RecordBatch, name: str) -> Float32:
    """Return what was told of each row besides under a name, as much of each; [row, number]."""
    column = batch["extras"]
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    own = pc.equal(column.keys.slice(first, last - first), name)
    found = column.items.slice(first, last - first).filter(own)
    assert len(found) == len(batch), f"every row has {name}"
    return flatten(found)[0].reshape(len(batch), -1)


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """Serialise a batch for log and wire: one compressed IPC message, without its schema."""
    sink = pa.BufferOutputStream()
    stream = pa.ipc.new_stream(sink, SCHEMA, options=_WRITE_OPTIONS)
    stream.write_batch(batch, {"checksum": _NO_CHECKSUM})
    content = bytearray(sink.getvalue()[len(_HEADER) :])
    message = pa.ipc.read_message(pa.py_buffer(content))
    place = content.index(_NO_CHECKSUM, 0, len(content) - message.body.size)
    content[place : place + len(_NO_CHECKSUM)] = _checksum_of(message)
    return bytes(content)


def from_bytes(message: bytes) -> pa.RecordBatch:
    """Undo `to_bytes`."""
    return pa.ipc.open_stream(_HEADER + message, options=_READ_OPTIONS).read_next_batch()


def has_rows(path: Path) -> bool:
    """Whether there is a log that has more than its header."""
    return path.is_file() and path.stat().st_size > len(_HEADER)


def read_log(path: Path, until: int) -> Iterator[pa.RecordBatch]:
    """Yield the intact batches before byte `until` of a log that a run may be writing meanwhile.

    Raises:
        RunFolderError: There is no log, or it is something else.
    """
    try:
        file = pa.OSFile(str(path), "rb")
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} does not exist, so the run has no rollouts yet") from error
    with file:
        _check_header(path, file)
        for message in _intact_messages(file):
            if file.tell() > until:
                return
            yield pa.ipc.read_record_batch(message, SCHEMA)


class RolloutLog:
    """The append-only log at `path`, created when missing; a context manager with one writer.

    Opening cuts off what a crash left of an unfinished write; `dropped_bytes` says how much. No
    call returns before its effect is on disk, and none waits for another process.

    Raises:
        RunFolderError: the file is something else.
        StorageError: the disk refused; the log then holds what it held before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped_bytes = 0
        """Bytes of a torn tail that opening cut off."""
        self.position = 0
        """End of the log in bytes."""
        self.start = len(_HEADER)
        """End of the log when it is empty."""
        with _storage_errors(path, "opened"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; everything appended is on disk already."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, batch: pa.RecordBatch) -> int:
        """Append one batch durably and return the log's end in bytes."""
        return self.append_all([to_bytes(batch)])

    def append_all(self, messages: Sequence[bytes]) -> int:
        """Append batches as `to_bytes` made them, with a single wait for the disk."""
        self._write(b"".join(messages))
        return self.position

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches in the order in which they were appended."""
        with pa.OSFile(str(self.path), "rb") as file:
            yield from pa.ipc.open_stream(file)

    def truncate(self, position: int) -> None:
        """Cut the log back to an earlier `position`: that of the checkpoint a run resumes from."""
        if not len(_HEADER) <= position <= self.position:
            raise StorageError(
                f"rollout log {self.path} ends at byte {self.position}, so it cannot be cut back "
                f"to byte {position}: it is not the log that the checkpoint was written beside"
            )
        with _storage_errors(self.path, "cut back"):
            os.ftruncate(self._file, position)
            os.fsync(self._file)
        self.position = position

    def _recover(self) -> None:
        """Find the end of the last intact batch and cut off what lies behind it."""
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, len(_HEADER), 0)
        if _HEADER.startswith(head.rstrip(b"\0")) and size <= len(_HEADER):
            end = 0  # new, or torn before its first batch
        else:
            end = _intact_bytes(self.path)
            self.dropped_bytes = size - end
        if end < size:
            with _storage_errors(self.path, "cut back"):
                os.ftruncate(self._file, end)
        self.position = end
        if end == 0:
            self._write(_HEADER)
            with _storage_errors(self.path, "created"):
                _sync_folder(self.path.parent)

    def _write(self, content: bytes) -> None:
        """Write at the end and wait for the disk; on failure leave the log as it was."""
        with _storage_errors(self.path, "written"):
            try:
                written = 0
                while written < len(content):
                    written += os.pwrite(
                        self._file, memoryview(content)[written:], self.position + written
                    )
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self.position)
                raise
        self.position += len(content)


@contextmanager
def _storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn what the operating system says about the disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"rollout log {path} could not be {action} ({error.strerror}): make room on the disk "
            "and resume; what was logged before is intact"
        ) from error


def _list_array(rows: Sequence[NDArray[Any]], kind: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.empty(0)
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind.value_type))


def _split(values: NDArray[Any], offsets: Int64) -> list[NDArray[Any]]:
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def _checksum_of(message: pa.Message) -> bytes:
    return b"crc32:%08x" % zlib.crc32(message.body)


def _intact_bytes(path: Path) -> int:
    """Return the end of the last batch in a row whose body agrees with its checksum."""
    with pa.memory_map(str(path)) as file:
        _check_header(path, file)
        end: int = file.tell()
        for _ in _intact_messages(file):
            end = file.tell()
        return end


def _check_header(path: Path, file: pa.NativeFile) -> None:
    """Read the schema and refuse another than ours."""
    try:
        schema = pa.ipc.read_schema(pa.ipc.read_message(file))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise RunFolderError(f"{path} is not a rollout log: it is not an Arrow stream") from error
    if schema != SCHEMA:
        raise RunFolderError(f"{path} is not a rollout log of this version: its columns differ")


def _intact_messages(file: pa.NativeFile) -> Iterator[pa.Message]:
    """Yield the batches in a row whose body agrees with its checksum."""
    while True:
        try:
            message = pa.ipc.read_message(file)
        except (pa.ArrowException, OSError, EOFError):
            return
        if _checksum_of(message) not in message.metadata.to_pybytes():
            return
        yield message


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
