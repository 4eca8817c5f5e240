"""The parameters of a tool's function: a JSON schema for the model, and the validation of its
arguments.

pydantic derives both from the annotations. Arguments are converted if their meaning is clear ("3"
for an int, 3 for a str), because a task should not fail for a wrong JSON type. An argument that
cannot be converted, is missing or is unknown gives an error text that names it. Descriptions come
from Annotated[..., "text"], or from the docstring's list of parameters.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, get_origin

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from planish.errors import UserError

# "Args:" as Google writes it, ":param x:" as Sphinx does.
SECTION_HEADING = re.compile(
    r"^\s*(args|arguments|parameters|returns?|raises|yields|examples?|notes?)\s*:\s*$",
    re.IGNORECASE,
)
DESCRIPTION_SECTIONS = ("example", "examples", "note", "notes")
"""Sections that stay in the description because they help a model to call the function."""
GOOGLE_PARAMETER = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
SPHINX_PARAMETER = re.compile(r"^\s*:param\s+(?:[\w\[\], .|]+\s+)?(\w+)\s*:\s*(.*)$")
SPHINX_FIELD = re.compile(r"^\s*:\w+[^:]*:")
MAX_ERROR_CHARS = 100


@dataclass(frozen=True)
class Docstring:
    """The parts of a function's docstring that a model reads."""

    description: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Parameters:
    """The parameters of one function: their JSON schema, and the validator of arguments."""

    schema: dict[str, Any]
    adapter: TypeAdapter[dict[str, Any]]

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments, converted to the function's types. If they are wrong, raise a
        UserError that is written for the model.
        """
        try:
            return dict(self.adapter.validate_python(dict(arguments)))
        except ValidationError as error:
            errors = "; ".join(
                _describe_error(detail)
                for detail in error.errors(include_url=False, include_context=False)
            )
            names = ", ".join(self.schema["properties"]) or "none"
            raise UserError(f"wrong arguments: {errors}. The parameters are: {names}") from None


class _UntitledSchema(GenerateJsonSchema):
    """A JSON schema without titles, because they only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_parameters(function: Callable[..., Any], documented: Mapping[str, str]) -> Parameters:
    """Return the parameters of `function`, except a first `self`. Raises UserError if a parameter
    has no type, or a type that cannot be written as JSON.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(
            f"tool {name}: an annotation cannot be resolved ({error}); import its type in the "
            "module"
        ) from error
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if number == 0 and parameter.name == "self":
            continue
        if parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise UserError(
                f"tool {name}: parameter {parameter} cannot be passed by name; write ordinary "
                "parameters"
            )
        if parameter.name not in hints:
            raise UserError(
                f"tool {name}: parameter {parameter.name} has no type; annotate it, such as "
                f"{parameter.name}: str"
            )
        fields[parameter.name] = _typed_dict_entry(
            parameter, hints[parameter.name], documented.get(parameter.name)
        )
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False)
    try:
        arguments: Any = TypedDict(name, fields)  # type: ignore[misc]
        arguments.__pydantic_config__ = config
        adapter = TypeAdapter(arguments)
        schema = adapter.json_schema(schema_generator=_UntitledSchema)
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(
            f"tool {name}: a parameter's type cannot be written as JSON ({first_line}); use str, "
            "int, float, bool, list, dict, Literal, Enum, Optional, a dataclass or a pydantic model"
        ) from error
    return Parameters(_inline_references(schema, name), adapter)


def read_docstring(text: str | None) -> Docstring:
    """Parse a docstring into the description and the texts of its parameters (Google or Sphinx
    style).
    """
    description: list[str] = []
    parameters: dict[str, str] = {}
    section, current_parameter = "", ""
    for line in inspect.cleandoc(text or "").splitlines():
        heading, sphinx_match = SECTION_HEADING.match(line), SPHINX_PARAMETER.match(line)
        google_match = (
            GOOGLE_PARAMETER.match(line) if section in ("args", "arguments", "parameters") else None
        )
        match = sphinx_match or google_match
        if heading and heading.group(1).lower() in DESCRIPTION_SECTIONS:
            section, current_parameter = "", ""
            description.append(line)
        elif heading:
            section, current_parameter = heading.group(1).lower(), ""
        elif match:
            current_parameter = match.group(1)
            parameters[current_parameter] = match.group(2).strip()
            section = section or "parameters"
        elif SPHINX_FIELD.match(line):
            section, current_parameter = "returns", ""
        elif current_parameter and line.strip():
            parameters[current_parameter] += f" {line.strip()}"
        elif not section:
            description.append(line)
    return Docstring("\n".join(description).strip(), parameters)


def _typed_dict_entry(parameter: inspect.Parameter, hint: Any, documented: str | None) -> Any:
    """Return the annotation of one TypedDict key: the type with its description and default."""
    metadata = list(hint.__metadata__) if get_origin(hint) is Annotated else []
    base_type = hint.__origin__ if metadata else hint
    has_description = any(isinstance(item, FieldInfo) and item.description for item in metadata)
    descriptions = [item for item in metadata if isinstance(item, str)] + (
        [documented] if documented else []
    )
    field_options: dict[str, Any] = (
        {"description": descriptions[0]} if descriptions and not has_description else {}
    )
    is_optional = parameter.default is not parameter.empty
    if is_optional:
        field_options["json_schema_extra"] = _default_entry(parameter.default)
    other_metadata = [item for item in metadata if not isinstance(item, str)]
    annotation = (base_type, *other_metadata, Field(**field_options))
    annotated = Annotated[annotation]  # pyright: ignore[reportInvalidTypeForm]
    return NotRequired[annotated] if is_optional else annotated


def _default_entry(value: Any) -> dict[str, Any]:
    json_value = getattr(value, "value", value)  # a member of an Enum
    try:
        json.dumps(json_value)
    except (TypeError, ValueError):
        return {}
    return {"default": json_value}


def _inline_references(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema with all references inlined, because models read it as plain text. Raises
    UserError for a type that contains itself.
    """
    definitions = schema.pop("$defs", {})

    def inline(part: Any, enclosing: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [inline(item, enclosing) for item in part]
        if not isinstance(part, dict):
            return part
        reference = part.get("$ref")
        if reference is None:
            return {key: inline(value, enclosing) for key, value in part.items()}
        target = reference.rpartition("/")[2]
        if target in enclosing:
            raise UserError(
                f"tool {name}: the type {target} contains itself, so its schema cannot be inlined; "
                "flatten it"
            )
        target_fields = {
            key: value
            for key, value in definitions[target].items()
            if key not in ("title", "additionalProperties")
        }
        rest = {key: value for key, value in part.items() if key != "$ref"}
        return inline({**target_fields, **rest}, (*enclosing, target))

    inlined = inline(schema, ())
    inlined.pop("title", None)
    inlined.pop("additionalProperties", None)
    return {"type": "object", "properties": inlined.pop("properties", {}), **inlined}


def _describe_error(detail: Any) -> str:
    location = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return f"{location} is missing"
    if detail["type"] == "extra_forbidden":
        return f"{location} is unknown"
    input_text = json.dumps(detail["input"], ensure_ascii=False, default=str)
    input_text = (
        input_text if len(input_text) <= MAX_ERROR_CHARS else input_text[:MAX_ERROR_CHARS] + "..."
    )
    return f"{location}={input_text}: {detail['msg']}"
