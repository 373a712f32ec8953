"""What a run's initial model answered to the held-out queries, kept for measures that compare.

The initial model is evaluated before the run, and its answers are kept in the run folder. Every
later evaluation asks the same queries with the same random numbers and reads them. A reference
that is reset during the run (`sync.reference_reset_every`) changes nothing here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tba.run.durable import replace_file, storage_errors
from tba.tasks.base import Answered


@dataclass(frozen=True, slots=True)
class ReferenceAnswers:
    """The file of the texts, one for each held-out query that evaluations ask."""

    file: Path
    """JSON: a list of texts in the order of the queries."""

    def compared_with(self, answered: Answered, policy_version: int) -> Sequence[str] | None:
        """Return the initial model's answers to the same queries; its own are kept.

        None where they were not kept, or for other queries, or the file is damaged.

        Raises:
            StorageError: They cannot be written.
        """
        if policy_version == 0:
            with storage_errors(f"the reference's answers {self.file}"):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self.file, [json.dumps(list(answered.texts), indent=0).encode()])
            return answered.texts
        if not self.file.is_file():
            return None
        try:
            texts = TypeAdapter(list[str]).validate_json(self.file.read_bytes())
        except ValidationError:
            return None
        return texts if len(texts) == len(answered.texts) else None
