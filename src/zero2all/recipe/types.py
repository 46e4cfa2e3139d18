"""What every section of a recipe is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from zero2all.base.paths import RemotePath, credentials_problem, is_url, to_path
from zero2all.base.plugins import builtin, builtin_names, name_problem
from zero2all.base.redact import redact
from zero2all.base.units import INT64_LIMIT, Duration, parse_bytes, parse_count

_TEXT_OR_NUMBER = WithJsonSchema({"type": ["string", "integer", "number"]})
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=1), _TEXT_OR_NUMBER]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), _TEXT_OR_NUMBER]
DurationField = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str), _TEXT_OR_NUMBER]
Degree = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]
Chosen = TypeVar("Chosen", int, float)


def require_chosen(value: Chosen | None, key: str) -> Chosen:
    if value is None:
        raise ValueError(f"{key} is not set: choose it with zero2all.train.hyperparameters")
    return value


def _require_local(path: Any) -> Any:
    if isinstance(path, str) and is_url(path):
        raise ValueError(
            "must be a local directory; an object store can hold the checkpoints (checkpoint.dir), the documents "
            "(corpus.dir) and the paths of sources"
        )
    return path


def _refuse_credentials(url: Any) -> Any:
    if isinstance(url, str) and (problem := credentials_problem(url)):
        raise ValueError(problem)
    return url


def _local_or_remote(path: Any) -> Any:
    found = to_path(_refuse_credentials(path)) if isinstance(path, str) else path
    if isinstance(found, RemotePath) and len(found.parts) < 3:
        raise ValueError(f"needs a name below the bucket, such as {found}/documents")
    return found


LocalDir = Annotated[Path, BeforeValidator(_require_local)]
AnyDir = Annotated[Path, BeforeValidator(_local_or_remote)]
# A password in the URL of a text is used to read it; it is not written into the recipe of a run, nor shown.
InputPath = Annotated[str, BeforeValidator(_refuse_credentials), PlainSerializer(redact, when_used="json")]


@dataclass(frozen=True)
class PluginName:
    """The type of a key that names a plugin: built in, installed, or ``module:Name``, which is not imported for it."""

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._require_known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": builtin_names(self.kind)}, {"type": "string"}]}

    def _require_known(self, name: str) -> str:
        if problem := name_problem(self.kind, name):
            raise ValueError(problem)
        return name


@dataclass(frozen=True)
class PluginChoice:
    """The JSON schema of a key that names a plugin with options: the built-in plugins and their options."""

    kind: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = {one.name: one.options.model_json_schema().get("properties", {}) for one in builtin(self.kind)}
        known = [
            {"type": "object", "properties": {"name": {"const": name}, **fields}} for name, fields in options.items()
        ]
        others = {"type": "object", "properties": {"name": {"not": {"enum": [*options]}}}}
        return {"oneOf": [{"type": "string"}, *known, others]}


COLLECT_MISTAKES = "collect mistakes"
"""Validation context in which broken rules raise nothing: the caller asks every section for its ``mistakes``."""


@dataclass(frozen=True)
class Mistake:
    """A broken rule over values that are valid one by one."""

    message: str
    keys: tuple[str, ...]
    """Dotted keys, from the section, of all values that the rule reads; the one most likely wrong is first. If one of
    them is invalid, the rule says nothing about what the user wrote."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """``seed: true`` is a mistake and not the seed 1, which pydantic would make of it."""
        if info.field_name in _number_fields(cls):
            _refuse_non_numbers(value)
        return value

    _OMITTED: ClassVar[frozenset[str]] = frozenset()
    """Keys that a recipe has only if they are set, so that recipes of runs from before them stay as they are."""

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if value or key not in self._OMITTED}

    def mistakes(self) -> Iterator[Mistake]:
        """The broken rules of this section alone, not of the sections in it."""
        return iter(())

    @model_validator(mode="after")
    def _keeps_its_rules(self, info: ValidationInfo) -> Self:
        if info.context != COLLECT_MISTAKES and (found := [mistake.message for mistake in self.mistakes()]):
            raise ValueError("; ".join(found))
        return self


@cache
def _number_fields(section: type[Section]) -> frozenset[str]:
    return frozenset(name for name, field in section.model_fields.items() if _takes_numbers_only(field.annotation))


def _takes_numbers_only(kind: Any) -> bool:
    """Whether a field has numbers somewhere, and nothing that could be true or false."""
    parts = list(_nested_types(kind))
    return any(part in (int, float, Duration) for part in parts) and not any(part in (bool, Any) for part in parts)


def _nested_types(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind):
        yield from _nested_types(part)


def _refuse_non_numbers(value: Any) -> None:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    if isinstance(value, int) and abs(value) >= INT64_LIMIT:
        raise ValueError("is too large")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        _refuse_non_numbers(one)
