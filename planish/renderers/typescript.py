"""Tool declarations as TypeScript, in the two styles of Harmony (gpt-oss) and of Kimi K2.5.

Both write a namespace with one function type for each tool. They differ in comments, indentation,
the order of properties and in the types that they know.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
_HARMONY_TYPES: dict[str, str] = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
}
_KIMI_UNION: dict[str, str] = {"integer": "number", "object": "{}", "array": "Array<any>"}
_KIMI_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}


def harmony_namespace(tools: Sequence[Schema]) -> str:
    """Return the declarations of `tools` as the package openai-harmony writes them. A tool without
    parameters has an empty parameter list, as in the chat template of gpt-oss.
    """
    functions = []
    for tool in tools:
        parameters = tool.get("parameters") or {}
        typed = f"(_: {_harmony_object(parameters, '')})" if parameters.get("properties") else "()"
        comments = [f"// {line}\n" for line in tool.get("description", "").splitlines()]
        functions.append(f"{''.join(comments)}type {tool['name']} = {typed} => any;\n\n")
    return (
        f"## functions\n\nnamespace functions {{\n\n{''.join(functions)}}} // namespace functions"
    )


def _harmony_object(schema: Schema, indent: str) -> str:
    description = schema.get("description")
    lines = [f"{indent}// {description}\n"] if description else []
    lines.append("{\n")
    for name, value in (schema.get("properties") or {}).items():
        mark = "" if name in schema.get("required", ()) else "?"
        default = _harmony_default(value)
        if "oneOf" in value:
            comments = _harmony_comments(value, indent)
            if default:
                comments += f"{indent}// {default}\n"
            lines.append(f"{comments}{indent}{name}{mark}:\n{_harmony_options(value, indent)},\n")
            continue
        typed = _harmony_type(value, f"{indent}    ")
        comment = f" // {default}" if default else ""
        lines.append(f"{_harmony_comments(value, indent)}{indent}{name}{mark}: {typed},{comment}\n")
    return "".join([*lines, f"{indent}}}"])


def _harmony_comments(schema: Schema, indent: str) -> str:
    lines = []
    if schema.get("title"):
        lines += [str(schema["title"]), ""]
    if schema.get("description"):
        lines.append(schema["description"])
    examples = [one for one in schema.get("examples") or () if isinstance(one, str)]
    if examples:
        lines += ["Examples:", *(f'- "{example}"' for example in examples)]
    return "".join(f"{indent}// {line}".rstrip() + "\n" for line in lines)


def _harmony_default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    is_plain = isinstance(value, str) and "enum" in schema
    return f"default: {value if is_plain else json.dumps(value, ensure_ascii=False)}"


def _harmony_options(schema: Schema, indent: str) -> str:
    options = []
    for option in schema["oneOf"]:
        remarks = [option.get("description", ""), _harmony_default(option)]
        remark = " ".join(filter(None, remarks))
        typed = _harmony_type(option, f"{indent}   ")
        options.append(f"{indent} | {typed}{f' // {remark}' if remark else ''}\n")
    return "".join(options)


def _harmony_type(schema: Schema, indent: str) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_HARMONY_TYPES.get(str(one), str(one)) for one in kind)
    suffix = " | null" if schema.get("nullable") else ""
    if kind == "object":
        return _harmony_object(schema, indent) + suffix
    if kind == "array":
        items = schema.get("items")
        return (f"{_harmony_type(items, indent)}[]" if items else "Array<any>") + suffix
    if kind == "string" and schema.get("enum"):
        return " | ".join(f'"{one}"' for one in schema["enum"]) + suffix
    return _HARMONY_TYPES.get(str(kind), "any") + suffix


def kimi_namespace(functions: Sequence[Schema]) -> str:
    """Return the declarations of `functions` in the form on which Kimi K2.5 was trained. Raises
    ValueError for a schema that this form cannot express.
    """
    texts = []
    for function in functions:
        parameters = function.get("parameters") or {}
        interfaces = [
            "\n".join(
                [*_comments(one.get("description"), ""), f"interface {name} {_kimi_type(one)}"]
            )
            for name, one in (parameters.get("$defs") or {}).items()
        ]
        typed = _kimi_object(parameters, "")
        texts += [
            *interfaces,
            *_comments(function.get("description"), ""),
            f"type {function['name']} = (_: {typed}) => any;",
        ]
    body = "\n".join(texts)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def _comments(text: str | None, indent: str) -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _kimi_remarks(schema: Schema, indent: str) -> list[str]:
    """Return the comment lines of a property: its description and its limits."""
    keys = _KIMI_CONSTRAINTS.get(str(schema.get("type")), ()) if _is_plain(schema) else ()
    limits = [f"{key}: {schema[key]}" for key in keys if key in schema]
    remarks = _comments(schema.get("description"), indent)
    return remarks + ([f"{indent}// {', '.join(limits)}"] if limits else [])


def _is_plain(schema: Schema) -> bool:
    return not any(key in schema for key in ("$ref", "anyOf", "enum"))


def _kimi_object(schema: Schema, indent: str) -> str:
    inner = f"{indent}  "
    required = schema.get("required", ())
    properties = schema.get("properties") or {}
    entries = []
    for name in sorted(properties, key=lambda name: (name not in required, name)):
        value = properties[name]
        lines = _kimi_remarks(value, inner) if isinstance(value, Mapping) else []
        default = value.get("default") if isinstance(value, Mapping) else None
        if default is not None:
            is_number = isinstance(default, (int, float))
            text = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
            lines.append(f"{inner}// Default: {text}")
        mark = "" if name in required else "?"
        entries.append("\n".join([*lines, f"{inner}{name}{mark}: {_kimi_type(value, inner)}"]))
    others = schema.get("additionalProperties")
    if others is not None:
        typed = (
            "any" if others is True else "never" if others is False else _kimi_type(others, inner)
        )
        entries.append(f"{inner}[k: string]: {typed}")
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}" if entries else "{}"


def _kimi_type(schema: Any, indent: str = "") -> str:
    if isinstance(schema, bool):
        return "any" if schema else "null"
    kind = schema.get("type")
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if "/" in name or name == "#":
            raise ValueError(
                f"a tool's schema has $ref={schema['$ref']!r}, which Kimi's declarations cannot "
                "write; refer to #/$defs/name, or write the schema out"
            )
        return name
    if "anyOf" in schema:
        return " | ".join(_kimi_type(one, indent) for one in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(
            f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"]
        )
    if isinstance(kind, list):
        return " | ".join(_KIMI_UNION.get(str(one), str(one)) for one in kind)
    if kind == "object":
        return _kimi_object(schema, indent)
    if kind == "array":
        items = schema.get("items") or {}
        remarks = _kimi_remarks(items, f"{indent}  ") if isinstance(items, Mapping) else []
        if not remarks:
            return f"Array<{_kimi_type(items, indent)}>"
        body = "\n".join([*remarks, f"{indent}  {_kimi_type(items, f'{indent}  ')}"])
        return f"Array<\n{body}\n{indent}>"
    return "number" if kind == "integer" else str(kind or "any")
