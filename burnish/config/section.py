"""What every group of settings has in common: unknown keys are refused, and values stay as they were given.

Left out: the settings (`burnish.config.schema`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

FunctionName = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]
"""file.py:name or module:name."""


class Section(BaseModel):
    """A group of settings; refuses unknown keys and cannot be changed once made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`n: true` is a mistake, though Python would read it as 1."""
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true and false are no values of this setting")
        return value
