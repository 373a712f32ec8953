"""The base of every config section: strict, frozen, self-describing."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Temperature = Annotated[float, Field(ge=1e-6)]
"""Of a softmax; divided by much less, numbers overflow."""


class Section(BaseModel):
    """A group of settings; the docstring under each field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
