"""Asynchronous, off-policy reinforcement learning of language models with trajectory balance.

Importing this imports no torch; `train`, `sft` and `resume` do, once the configuration is known
to be right.
"""

from tba.api import resume, sft, train
from tba.config import Config
from tba.config.load import dump_toml, load_config
from tba.errors import TbaError, UserError
from tba.records import (
    Batch,
    EvalReport,
    FinishReason,
    Outcome,
    Query,
    Response,
    Score,
    StepReport,
    Trajectory,
)

__all__ = [
    "Batch",
    "Config",
    "EvalReport",
    "FinishReason",
    "Outcome",
    "Query",
    "Response",
    "Score",
    "StepReport",
    "TbaError",
    "Trajectory",
    "UserError",
    "dump_toml",
    "load_config",
    "resume",
    "sft",
    "train",
]
