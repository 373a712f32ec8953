"""A manifest seals a folder: the size and SHA-256 of every file in it, written last.

A folder without a manifest was never finished; one that disagrees with it was damaged afterwards.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tba.run.durable import replace_file, sync_directory

MANIFEST = "MANIFEST.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest knows about one file."""

    size: NonNegativeInt
    """In bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Its content."""


_Records = TypeAdapter(dict[str, FileRecord])


def seal(folder: Path) -> None:
    """Make every file below `folder` durable, then write its manifest."""
    records = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_directory(path)
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        records[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": digest,
        }
    replace_file(folder / MANIFEST, [json.dumps(records, indent=1).encode()])


def flaw(folder: Path) -> str | None:
    """Return what is wrong with a sealed folder, naming the file, or None if it is whole."""
    try:
        records = _Records.validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValidationError:
        return f"{MANIFEST} is damaged"
    for name, record in records.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                return f"{name} was altered (its SHA-256 differs)"
    return None
