"""What all sections of a configuration have in common."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Value = TypeVar("Value")
MAY_CHANGE = {"may_change_on_resume": True}
MayChange = Annotated[Value, Field(json_schema_extra=MAY_CHANGE)]
"""The type of a setting, or of a whole section, that may change when a run is resumed.

It decides how fast, how long or how visibly a run works, and not what a step computes.
"""
FunctionName = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]
"""file.py:name or module:name."""


class Section(BaseModel):
    """A frozen group of settings, without unknown keys and conversions of types."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_nothing_as_defaults(cls, value: Any) -> Any:
        return {} if value is None else value
