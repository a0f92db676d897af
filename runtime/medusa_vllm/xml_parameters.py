"""How models that call tools in XML write an object's properties: strings as they are, and other values as JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

_MOST_REFERENCES = 16


class XmlStyle(NamedTuple):
    """The text around a property: before its name, between the name and the value, and behind the value.

    Strings and other values have their own text between. None stands for white space that may be there.
    """

    before_name: str
    before_string: tuple[str | None, ...]
    before_json: tuple[str | None, ...]
    end: str


def _deepseek(space: str) -> XmlStyle:
    tag = f"｜DSML｜{space}parameter"
    return XmlStyle(f'<{tag} name="', ('" string="true">',), ('" string="false">',), f"</{tag}>")


_GLM = ("</arg_key>", None, "<arg_value>")
STYLES = {  # by xgrammar's name
    "qwen_xml": XmlStyle("<parameter=", (">",), (">",), "</parameter>"),
    "minimax_xml": XmlStyle('<parameter name="', ('">',), ('">',), "</parameter>"),
    "glm_xml": XmlStyle("<arg_key>", _GLM, _GLM, "</arg_value>"),
    "deepseek_xml": _deepseek(""),
    "deepseek_v4_1_xml": _deepseek(" "),
}


class PropertyKind(NamedTuple):
    """Which values a property may have: strings (``choices`` if they are listed), and others."""

    strings: bool
    choices: tuple[str, ...]
    others: bool


def property_kind(schema: dict[str, Any]) -> PropertyKind:
    """Return which values a property's schema allows, as far as that is easily seen."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        place, _, name = reference.removeprefix("#/").partition("/")
        found = schema.get(place, {}).get(name) if isinstance(schema.get(place, {}), dict) else None
        if not isinstance(found, dict):
            break
        schema = {place: schema[place], **found}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        strings = tuple(each for each in listed if isinstance(each, str))
        return PropertyKind(bool(strings), strings, len(strings) < len(listed))
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        named = [kinds] if isinstance(kinds, str) else kinds
        return PropertyKind("string" in named, (), any(kind != "string" for kind in named))
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list) and all(isinstance(each, dict) for each in alternatives):
        simple = [each.get("type") for each in alternatives]
        if all(isinstance(kind, str) for kind in simple):
            return PropertyKind("string" in simple, (), any(kind != "string" for kind in simple))
    return PropertyKind(strings=True, choices=(), others=True)
