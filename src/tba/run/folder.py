"""The run folder: everything a run knows, and a lock that says whether the run is alive.

    config.json        the resolved configuration; resuming uses it and nothing else
    metrics.jsonl      one line of scalars a step
    summary.json       before and after, totals, how the run ended
    rollouts.arrows    every trajectory that reached the buffer
    checkpoints/       the newest checkpoints
    evaluations/       what evaluations during the run came to, one file a checkpoint
    model/             the initial policy, which is the reference, when it was built or warm-started
    smoothed/          what `tba smooth` made of it
    logs/              one file a process
    tba.lock           marks a run folder; the live run holds a lock on it

The lock is the kernel's (`flock`): it ends with the process that holds it, so a killed run leaves
none behind.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from tba.config import Config
from tba.errors import RunFolderError
from tba.run.durable import replace_file, storage_errors
from tba.run.metrics import last_step
from tba.run.rollouts import has_rows
from tba.run.summary import Ending, Summary

# What a run makes, as patterns: all that `clean` removes. The configuration goes first, so that a
# folder half cleaned cannot be resumed.
_MADE = (
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "rollouts.arrows*",
    "checkpoints/step-*",
    "checkpoints/tmp-*",
    "model",
    "model.unfinished",
    "logs/*.log",
    "evaluations/*.json",
    "smoothed*",
)
_REPLACED = "tba.replaced"
"""Where `clean` puts an older run until the new one has begun."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The places inside a run folder. It holds nothing open, so that any process may have one."""

    path: Path
    """The folder itself."""

    @classmethod
    @contextmanager
    def create(cls, path: Path, config: Config, *, clean: bool = False) -> Iterator[Self]:
        """Begin a run in a new, empty or cleaned folder, and hold it while the block runs.

        A run that failed before it had found anything leaves nothing to keep: its folder counts as
        empty.
        If the block fails before it has called `begun`, the folder is put back as it was, one that
        was not there is removed.

        Raises:
            RunFolderError: the folder is in use, already used (unless `clean`), or no run's.
            StorageError: it cannot be written.
        """
        folder = cls(path)
        folder._refuse_foreign()
        is_new = not path.exists()
        with storage_errors(f"run folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
        with folder._locked():
            if folder._made() and not clean and not folder._came_to_nothing():
                raise RunFolderError(
                    f"run folder {path} already holds a run: go on with it by --resume {path}, "
                    "delete it by --clean, or choose another --run-dir"
                )
            try:
                with storage_errors(f"run folder {path}"):
                    folder._prepare(config)
                yield folder
            except BaseException:
                if folder._restore() and is_new:
                    shutil.rmtree(path, ignore_errors=True)
                raise
            folder.begun()

    @classmethod
    @contextmanager
    def resume(cls, path: Path) -> Iterator[Self]:
        """Go on with the run in a folder, and hold it while the block runs.

        Raises:
            RunFolderError: the folder is in use, or holds no run.
        """
        folder = cls.open(path)
        with folder._locked():
            yield folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the folder of a run, alive or not, for reading.

        Raises:
            RunFolderError: the folder holds no run.
        """
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"run folder {path} does not exist: check the path")
        if folder.lock_file.is_file() and not folder.config_file.is_file():
            raise RunFolderError(
                f"no run has begun in {path}: start one there by tba train RECIPE --run-dir {path}"
            )
        if not folder.lock_file.is_file():
            raise RunFolderError(
                f"{path} is not a run folder (tba.lock is missing): name the folder "
                "that `tba train` made"
            )
        return folder

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def lock_file(self) -> Path:
        """Marks a run folder; its content is the process id of the run that last held it."""
        return self.path / "tba.lock"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What the run came to."""
        return self.path / "summary.json"

    @property
    def rollouts(self) -> Path:
        """The append-only log of trajectories."""
        return self.path / "rollouts.arrows"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint."""
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """One report an evaluation during the run."""
        return self.path / "evaluations"

    @property
    def reference_answers(self) -> Path:
        """The initial model's answers to the held-out queries, where a measure compares them."""
        return self.evaluations / "reference.json"

    @property
    def model(self) -> Path:
        """The initial policy as a Hugging Face folder, if this run made it."""
        return self.path / "model"

    def log(self, role: str) -> Path:
        """Return the log file of one process, such as `trainer` or `searcher-0`."""
        return self.path / "logs" / f"{role}.log"

    def config(self) -> Config:
        """Read the stored configuration back.

        Raises:
            RunFolderError: it is not one of this version's.
        """
        try:
            return Config.model_validate_json(self.config_file.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise RunFolderError(
                f"{self.config_file} cannot be used: {where}: {first['msg']}; restore the "
                "file, or begin anew in another folder"
            ) from error

    def begun(self) -> None:
        """Note that the run has begun: what `clean` put aside is not needed any more."""
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _refuse_foreign(self) -> None:
        """Refuse a file, and a folder with something in it that no run put there."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run folder {self.path} is a file: choose another --run-dir")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.lock_file.is_file():
            raise RunFolderError(
                f"{self.path} is not empty and not a run folder, so nothing in it is touched: "
                "choose another --run-dir"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with storage_errors(f"lock file {self.lock_file}"):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                raise RunFolderError(
                    f"run folder {self.path} is in use by a live run (process {holder}): wait for "
                    "it, stop it, or choose another --run-dir"
                ) from error
            with storage_errors(f"lock file {self.lock_file}"):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    @property
    def _replaced(self) -> Path:
        return self.path / _REPLACED

    def _came_to_nothing(self) -> bool:
        """Whether the run here failed before it found anything, and was not resumed since."""
        try:
            summary = Summary.read(self.summary)
        except (OSError, ValidationError):
            return False
        failed_at_once = summary.ended is Ending.FAILED and summary.steps == 0
        return failed_at_once and not (
            any(self.checkpoints.glob("step-*"))
            or last_step(self.metrics)
            or has_rows(self.rollouts)
        )

    def _made(self) -> list[Path]:
        return _made_in(self.path)

    def _prepare(self, config: Config) -> None:
        """Put an older run aside and write down what the new one is."""
        self.begun()  # a killed run may have left something there
        self._replaced.mkdir()
        self._move(self.path, self._replaced)
        self.checkpoints.mkdir(exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        replace_file(self.config_file, [config.model_dump_json(indent=2).encode()])

    @staticmethod
    def _move(source: Path, target: Path) -> None:
        """Move what a run made from one folder into another, file by file or folder by folder."""
        for path in _made_in(source):
            moved = target / path.relative_to(source)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)

    def _restore(self) -> bool:
        """Remove what a run made, and put the older one back, unless it had begun; say whether."""
        if not self._replaced.exists():
            return False
        for path in self._made():
            _delete(path)
        self._move(self._replaced, self.path)
        self.begun()
        return True


def _made_in(folder: Path) -> list[Path]:
    return [path for pattern in _MADE for path in sorted(folder.glob(pattern))]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
