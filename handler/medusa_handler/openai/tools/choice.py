"""What a request offers and forces: ``tools``, ``tool_choice`` and ``parallel_tool_calls``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from medusa_runtime.engine.base import StructuredOutputs

from ...faults import ApiError, invalid, unsupported
from ..body.fields import Refusal, check_inner_fields
from ..body.parameters import Body, flag
from .formats import ForcedCallsParser, Format, NamedCallParser, ToolParser

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_EXPECTED_FLAT_CHOICE = (
    '"auto", "none", "required", {"type": "function", "name": …} or {"type": "allowed_tools", "mode": …, "tools": …}'
)
_EXPECTED_TYPED_CHOICE = '{"type": …}, with auto, any, tool (and a name) or none as the type'
_ONE_CALL = "tool_choice.disable_parallel_tool_use"
_SCHEMA_TOOL = frozenset(
    (
        "type",
        "name",
        "description",
        "input_schema",
        "strict",
        "cache_control",
        "eager_input_streaming",
        "input_examples",
    )
)
_FUNCTION = frozenset(("type", "name", "description", "parameters", "strict"))
_LATER = Refusal("all tools are shown to the model at once, and called by it alone")
_REFUSED_OF_FUNCTION = {
    "defer_loading": _LATER,
    "allowed_callers": Refusal(_LATER.reason, (["direct"],)),
    "async": _LATER,
    "output_schema": Refusal("chat templates show no schemas of what a function returns"),
}


@dataclass(frozen=True)
class Tools:
    """The tools of a request. ``choice`` is "auto", "none", "required" or "named".

    ``forced`` is "", "required", or the name of the function that must be called.
    """

    offered: list[dict[str, Any]]
    choice: str
    forced: str
    parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(str(tool["function"]["name"]) for tool in self.offered)

    def output_constraint(self, found: Format | None) -> StructuredOutputs | None:
        """Return the constraint on an answer in this format if a call is forced, else None. Raises ApiError 400."""
        if not self.forced:
            return None
        try:
            if found is not None and found.forced is not None:
                schemas = {str(tool["function"]["name"]): _parameters(tool) for tool in self.offered}
                wanted = schemas if self.forced == "required" else {self.forced: schemas[self.forced]}
                return found.forced(dict(wanted))
            if self.forced == "required":
                return _schema(self._calls_schema())
            tool = next(tool for tool in self.offered if tool["function"]["name"] == self.forced)
            return _schema(_parameters(tool))
        except RecursionError:
            raise invalid("tools", "schemas of less depth", self.offered) from None

    def _calls_schema(self) -> dict[str, Any]:
        """Return the schema of a list of calls of any of the tools."""
        # Each tool's schema is placed below $defs, and its references to its own root are changed to lead there.
        schemas = {f"tool{number}": _moved(_parameters(tool), number) for number, tool in enumerate(self.offered)}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "parameters": {"$ref": f"#/$defs/tool{number}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for number, tool in enumerate(self.offered)
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": schemas}

    def parser(self, found: Format | None) -> Callable[[], ToolParser] | None:
        """Return a function that makes the parser of one answer; None if answers are plain text."""
        if found is not None and found.forced is not None:
            names = frozenset() if self.choice == "none" else self.names
            return lambda: found.parser(names)
        if not self.offered or self.choice == "none":
            return None
        named = () if found is None else (found.new_id,)
        if self.forced == "required":
            return lambda: ForcedCallsParser(*named)
        if self.forced:
            return lambda: NamedCallParser(self.forced, *named)
        return None if found is None else lambda: found.parser(self.names)


def tools_of(body: Body) -> Tools:
    """Return the tools of a body. Raises ApiError 400."""
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(_tools(body))]
    return _chosen(body, tools, body.get("tool_choice"))


def flat_tools_of(body: Body) -> Tools:
    """Return the tools of a body of /v1/responses, where a tool is the function itself. Raises ApiError 400."""
    tools = [_flat_tool(tool, f"tools[{number}]") for number, tool in enumerate(_tools(body))]
    choice = body.get("tool_choice")
    if not isinstance(choice, Mapping):
        return _chosen(body, tools, choice)
    if choice.get("type") == "allowed_tools":
        return _chosen(body, _allowed(choice, tools), choice.get("mode"))
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise invalid("tool_choice", _EXPECTED_FLAT_CHOICE, choice)
    check_inner_fields(choice, "tool_choice", frozenset(("type", "name")))
    return _chosen(body, tools, {"type": "function", "function": {"name": choice["name"]}})


def blocks_tools_of(body: Body) -> Tools:
    """Return the tools of a body of /v1/messages, where a tool has an ``input_schema``. Raises ApiError 400."""
    tools = [_schema_tool(tool, f"tools[{number}]") for number, tool in enumerate(_tools(body))]
    choice = body.get("tool_choice")
    if choice is None:
        return _chosen({}, tools, None)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice", _EXPECTED_TYPED_CHOICE, choice)
    check_inner_fields(choice, "tool_choice", frozenset(("type", "name", "disable_parallel_tool_use")))
    one = flag({_ONE_CALL: choice.get("disable_parallel_tool_use")}, _ONE_CALL)
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise invalid("tool_choice.name", "the name of one of the tools", choice.get("name"))
    named = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = {"parallel_tool_calls": not one}
    return _chosen(parallel, tools, named if kind == "tool" else "required" if kind == "any" else kind)


def _tools(body: Body) -> list[Any]:
    offered = body.get("tools")
    if offered is not None and not isinstance(offered, list):
        raise invalid("tools", "a list of objects", offered)
    return offered or []


def _chosen(body: Body, tools: list[dict[str, Any]], choice: Any) -> Tools:
    parallel = flag(body, "parallel_tool_calls", True)
    if choice is None:
        choice = "auto" if tools else "none"
    forced = ""
    if isinstance(choice, Mapping):
        forced = _named(choice, tools)
    elif choice not in ("auto", "none", "required"):
        expected = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'
        raise invalid("tool_choice", expected, choice)
    elif choice == "required":
        forced = choice
    if choice != "none" and not tools:
        raise invalid("tool_choice", "tools with it", choice)
    return Tools(tools, "named" if isinstance(choice, Mapping) else choice, forced, parallel)


def check_name(value: Any, field: str) -> None:
    """Raise ApiError 400, which names the field, if a value cannot be a function's name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise invalid(field, "a name of letters, digits and any of _ - . : /, of at most 128 characters", value)


def _allowed(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that a choice of type ``allowed_tools`` allows. Raises ApiError 400."""
    check_inner_fields(choice, "tool_choice", frozenset(("type", "mode", "tools")))
    if choice.get("mode") not in ("auto", "required"):
        raise invalid("tool_choice.mode", '"auto" or "required"', choice.get("mode"))
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not allowed:
        raise invalid("tool_choice.tools", "a list of at least one tool", allowed)
    known = {tool["function"]["name"]: tool for tool in tools}
    found = {}
    for number, tool in enumerate(allowed):
        name = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(name, str) or name not in known:
            expected = '{"type": "function", "name": …}, with the name of one of the tools'
            raise invalid(f"tool_choice.tools[{number}]", expected, tool)
        found[name] = known[name]
    return list(found.values())


def _tool(tool: Any, name: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise invalid(name, '{"type": "function", "function": {"name": …}}', tool)
    _check_function(function, f"{name}.function")
    return {**tool, "type": "function"}


def _flat_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise unsupported(name, '{"type": "function", "name": …}, the only type of tools here', tool)
    check_inner_fields(tool, name, _FUNCTION, _REFUSED_OF_FUNCTION)
    _check_function(tool, name)
    function = {field: tool[field] for field in tool if field in _FUNCTION and field != "type"}
    return {"type": "function", "function": function}


def _schema_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise unsupported(name, '{"name": …, "input_schema": …}, the only type of tools here', tool)
    check_inner_fields(tool, name, _SCHEMA_TOOL, _REFUSED_OF_FUNCTION)
    schema, description = tool.get("input_schema"), tool.get("description")
    check_name(tool.get("name"), f"{name}.name")
    if not isinstance(schema, Mapping):
        raise invalid(f"{name}.input_schema", "a JSON schema", schema)
    if description is not None and not isinstance(description, str):
        raise invalid(f"{name}.description", "text", description)
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": schema}}


def _check_function(function: Mapping[str, Any], name: str) -> None:
    check_name(function.get("name"), f"{name}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{name}.parameters", "a JSON schema", parameters)


def _named(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise invalid("tool_choice", '{"type": "function", "function": {"name": …}}', choice)
    if name not in (tool["function"]["name"] for tool in tools):
        raise ApiError(
            400, f'tool_choice: expected the name of one of the tools, found "{name}"', param="tool_choice",
            code="invalid_value",
        )  # fmt: skip
    return name


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})


def _moved(schema: Any, number: int) -> Any:
    """Return the schema with references to its root changed to its place below $defs."""
    if isinstance(schema, list):
        return [_moved(item, number) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/tool{number}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, number)
        for key, value in schema.items()
    }


def _schema(schema: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs("json_schema", json.dumps(schema, ensure_ascii=False))
