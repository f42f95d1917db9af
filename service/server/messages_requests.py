"""/v1/messages: the schema of a body, and its translation to a chat body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .error_documents import ApiError
from .schemas import CHAT, MESSAGES_LIMIT, PARTS_LIMIT, STOPS_LIMIT, TOOLS_LIMIT

_CHAT = CHAT["properties"]
_OPTIONAL_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_OPTIONAL_OBJECT: dict[str, Any] = {"type": ["object", "null"]}
_CONTENT: dict[str, Any] = {
    "type": ["string", "array"],
    "maxItems": PARTS_LIMIT,
    "items": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "description": "text, image, thinking, tool_use or tool_result."},
            "text": _OPTIONAL_TEXT,
            "thinking": _OPTIONAL_TEXT,
            "source": _OPTIONAL_OBJECT,
            "id": _OPTIONAL_TEXT,
            "name": _OPTIONAL_TEXT,
            "input": _OPTIONAL_OBJECT,
            "tool_use_id": _OPTIONAL_TEXT,
            "content": {"type": ["string", "array", "null"], "items": {"type": "object"}, "maxItems": PARTS_LIMIT},
        },
    },
}
# Passed through unchanged.
_SHARED = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "stream"),
    *("min_p", "repetition_penalty", "seed", "chat_template_kwargs", "onedesk"),
)
_UNSUPPORTED: Mapping[str, str] = {
    "container": "nothing is executed here",
    "mcp_servers": "this service calls no other; connect them in the client",
    "context_management": "conversations are not edited; send what the model should read",
}

MESSAGES: Mapping[str, Any] = {
    "type": "object",
    "required": ["messages", "max_tokens"],
    "properties": {
        **{name: _CHAT[name] for name in _SHARED},
        "max_tokens": {"type": "integer", "minimum": 1},
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": MESSAGES_LIMIT,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string", "enum": ["user", "assistant", "system"]},
                    "content": _CONTENT,
                },
            },
        },
        "system": {"anyOf": [{"type": "null"}, _CONTENT]},
        "stop_sequences": {
            "type": ["array", "null"],
            "maxItems": STOPS_LIMIT,
            "items": {"type": "string", "minLength": 1},
        },
        "thinking": {
            "type": ["object", "null"],
            "required": ["type"],
            "description": "Left out: no thoughts, where the chat template can turn them off.",
            "properties": {
                "type": {"type": "string", "enum": ["enabled", "adaptive", "disabled"]},
                "budget_tokens": {"type": ["integer", "null"], "minimum": 0},
            },
        },
        "tools": {
            "type": ["array", "null"],
            "maxItems": TOOLS_LIMIT,
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "type": {"type": ["string", "null"], "description": "custom, or left out: the only kind."},
                    "name": {"type": "string", "minLength": 1},
                    "description": _OPTIONAL_TEXT,
                    "input_schema": _OPTIONAL_OBJECT,
                },
            },
        },
        "tool_choice": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {
                "type": {"type": "string", "enum": ["auto", "any", "tool", "none"]},
                "name": _OPTIONAL_TEXT,
                "disable_parallel_tool_use": {"type": ["boolean", "null"]},
            },
        },
        "output_config": {
            "type": ["object", "null"],
            "properties": {
                "format": {
                    "type": ["object", "null"],
                    "required": ["type", "schema"],
                    "properties": {"type": {"type": "string", "enum": ["json_schema"]}, "schema": {"type": "object"}},
                },
                "effort": {"type": ["string", "null"], "description": "Ignored."},
            },
        },
        "metadata": {"type": ["object", "null"], "description": "Ignored."},
        **{name: {"description": f"Not supported: {why}."} for name, why in _UNSUPPORTED.items()},
    },
}
COUNT_TOKENS: Mapping[str, Any] = MESSAGES | {"required": ["messages"]}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /v1/chat/completions for one of MESSAGES. Raises ApiError 400 that names an unsupported field.

    A last message of the assistant is a prefill of the answer, as in Anthropic's API.
    """
    for name, why in _UNSUPPORTED.items():
        if body.get(name):
            raise ApiError(400, f"{name} is not supported: {why}", code="unsupported", param=name)
    made: dict[str, Any] = {name: body[name] for name in _SHARED if body.get(name) is not None}
    messages = [{"role": "system", "content": _content(body["system"], "system")}] if body.get("system") else []
    for at, message in enumerate(body["messages"]):
        messages += _messages(message, f"messages[{at}].content")
    made["messages"] = messages
    last = messages[-1] if messages else {"role": ""}
    if last["role"] == "assistant" and "tool_calls" not in last:
        made["continue_final_message"] = True
    if body.get("stop_sequences"):
        made["stop"] = list(body["stop_sequences"])
    made |= _thinking(body.get("thinking") or {"type": "disabled"}, made.get("chat_template_kwargs") or {})
    made |= _tools(body)
    form = (body.get("output_config") or {}).get("format")
    if form is not None:
        made["response_format"] = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    return made


def _thinking(thinking: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    wanted = thinking["type"] != "disabled"
    made: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": wanted, **options}}
    if wanted and thinking.get("budget_tokens") is not None:
        made["thinking_budget"] = thinking["budget_tokens"]
    return made


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = []
    for at, tool in enumerate(body.get("tools") or ()):
        if tool.get("type") not in (None, "custom"):
            message = f"tools[{at}].type is {tool['type'][:40]!r}; only tools of your own (custom) are supported"
            raise ApiError(400, message, code="unsupported", param=f"tools[{at}].type")
        described = {"description": tool["description"]} if tool.get("description") is not None else {}
        parameters = tool.get("input_schema") or {"type": "object"}
        tools.append({"type": "function", "function": {"name": tool["name"], **described, "parameters": parameters}})
    made: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.get("tool_choice")
    if choice is not None:
        if choice["type"] == "tool" and not choice.get("name"):
            raise ApiError(
                400, "tool_choice.name is missing; give a tool's name", code="missing_field", param="tool_choice.name"
            )
        named = {"type": "function", "function": {"name": choice.get("name")}}
        made["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            made["parallel_tool_calls"] = False
    return made


def _messages(message: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """The equivalent chat messages: tool results become messages of their own, before the user's text."""
    content = message["content"]
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        inner = f"{path}[{at}]"
        kind = block["type"]
        if kind == "tool_result" and message["role"] == "user":
            text = _content(block.get("content") or "", f"{inner}.content")
            results.append({"role": "tool", "tool_call_id": _given(block, "tool_use_id", inner), "content": text})
        elif kind == "tool_use" and message["role"] == "assistant":
            function = {"name": _given(block, "name", inner), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "thinking" and message["role"] == "assistant":
            thoughts.append(block.get("thinking") or "")
        elif kind != "redacted_thinking" or message["role"] != "assistant":
            parts.append(_part(block, inner))
    made: dict[str, Any] = {"role": message["role"], "content": parts}
    made |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    made |= {"tool_calls": calls} if calls else {}
    return [*results, *([made] if parts or calls or thoughts or not results else [])]


def _content(content: str | Sequence[Mapping[str, Any]], path: str) -> Any:
    return content if isinstance(content, str) else [_part(block, f"{path}[{at}]") for at, block in enumerate(content)]


def _part(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A part in chat form. Images are passed on: the chat code accepts or refuses them."""
    kind, source = block.get("type"), block.get("source") or {}
    if kind == "text":
        return {"type": "text", "text": block.get("text") or ""}
    if kind == "image" and source.get("type") == "base64":
        url = f"data:{source.get('media_type') or 'image/png'};base64,{source.get('data') or ''}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "image" and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    message = f"{path}.type is {str(kind)[:40]!r}, which is not supported here; use text or image"
    raise ApiError(400, message, code="unsupported", param=f"{path}.type")


def _given(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not value:
        raise ApiError(400, f"{path}.{name} is missing; give a text", code="missing_field", param=f"{path}.{name}")
    return value
