"""What every section of a recipe is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)

from zero2all.units import Duration, parse_bytes, parse_count

_TEXT_OR_NUMBER = WithJsonSchema({"type": ["string", "integer", "number"]})
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1), _TEXT_OR_NUMBER]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), _TEXT_OR_NUMBER]
Span = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str), _TEXT_OR_NUMBER]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)
