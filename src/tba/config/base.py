"""The base of every config section: strict, frozen, self-describing."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings; the docstring under each field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
