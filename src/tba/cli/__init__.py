"""The command line: `tba train`, `sft`, `reward-model`, `smooth`, `eval`, `pareto`, `plan` ...

Whatever the user got wrong ends in one sentence on stderr and exit code 2; a run that could not go
on, in one sentence and exit code 1; Ctrl-C, in 130 after the run has closed. Torch is imported
inside the commands, once the configuration was validated, so that a wrong key answers at once.
"""

from tba.cli import (  # each registers its command
    analyse,
    doctor,
    evaluate,
    pareto,
    plan,
    reward_model,
    sft,
    smooth,
    train,
    transfer,
)
from tba.cli.app import app

__all__ = [
    "analyse",
    "app",
    "doctor",
    "evaluate",
    "main",
    "pareto",
    "plan",
    "reward_model",
    "sft",
    "smooth",
    "train",
    "transfer",
]


def main() -> None:
    """Run the command line."""
    app()
