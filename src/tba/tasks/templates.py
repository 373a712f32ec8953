r"""Prompt templates by name, for the tasks that ask problems."""

import difflib
from types import MappingProxyType

from tba.errors import ConfigError

TEMPLATES = MappingProxyType(
    {
        "plain": "{problem}",
        "paper": "[MATH_TASK] Problem:\n{problem}\n\nSolution:",
        "boxed": (
            "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
        ),
        "tags": (
            "{problem}\nThink step by step, and write your final answer between <answer> and "
            "</answer>."
        ),
    }
)
"""`paper` is that of the paper's GSM8K policy, fine-tuned by VinePPO (2410.01679), without chat."""


def template_text(given: str, setting: str, placeholder: str) -> str:
    """Return the text of a template that is given by name or as a text with a placeholder.

    Args:
        given: The value of the setting.
        setting: Its name, for messages.
        placeholder: What stands for the problem in this task's templates, without braces.

    Raises:
        ConfigError: It is no name, and the problem has no place in it.
    """
    if given in TEMPLATES:
        return TEMPLATES[given].replace("{problem}", f"{{{placeholder}}}")
    if "{" not in given:
        near = difflib.get_close_matches(given, TEMPLATES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{setting} is {given!r:.80}, but there is no such template and it has no place for "
            f"the problem: {hint}give one of {', '.join(TEMPLATES)}, or a text with "
            f"{{{placeholder}}}"
        )
    return given
