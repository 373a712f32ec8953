"""Finds the public data sets that some tests read in place."""

import os
from pathlib import Path


def find_data():
    """Return the folder of shared data sets, or None."""
    named = os.environ.get("TBA_DATA")
    roots = [Path(named)] if named else [p / "shared/data" for p in Path(__file__).parents]
    return next((root for root in roots if (root / "gsm8k/train.jsonl").is_file()), None)
