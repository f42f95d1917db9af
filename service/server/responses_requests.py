"""/v1/responses: the schema of a body, and its translation to a chat body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .error_documents import ApiError
from .schemas import CHAT, MESSAGES_LIMIT, NAME_LIMIT, PARTS_LIMIT, TOOLS_LIMIT

_CHAT = CHAT["properties"]
_OPTIONAL_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_OPTIONAL_OBJECT: dict[str, Any] = {"type": ["object", "null"]}
# Passed through unchanged.
_SHARED = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("logit_bias", "stream", "parallel_tool_calls", "thinking_budget", "chat_template_kwargs", "onedesk", "model"),
)
# Unsupported fields that would change the answer, with what to do instead.
_UNSUPPORTED: Mapping[str, str] = {
    "previous_response_id": "no responses are kept; send the whole conversation as input",
    "conversation": "no conversations are kept; send the whole conversation as input",
    "background": "answers are not written in the background; leave it out or false",
    "prompt": "there are no stored prompts; send instructions and input",
    "top_logprobs": "use /v1/chat/completions for log-probabilities",
    "context_management": "conversations are not compacted; send what the model should read",
}
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")

RESPONSES: Mapping[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        **{name: _CHAT[name] for name in _SHARED},
        "input": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MESSAGES_LIMIT,
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {"type": ["string", "null"], "description": f"One of {', '.join(_ITEM_TYPES)}."},
                            "role": {
                                "type": ["string", "null"],
                                "enum": ["user", "assistant", "system", "developer", None],
                            },
                            "content": {
                                "type": ["string", "array", "null"],
                                "items": {"type": "object"},
                                "maxItems": PARTS_LIMIT,
                            },
                            "summary": {
                                "type": ["array", "null"],
                                "items": {"type": "object"},
                                "maxItems": PARTS_LIMIT,
                            },
                            "call_id": _OPTIONAL_TEXT,
                            "name": _OPTIONAL_TEXT,
                            "arguments": _OPTIONAL_TEXT,
                            "output": {
                                "type": ["string", "array", "null"],
                                "items": {"type": "object"},
                                "maxItems": PARTS_LIMIT,
                            },
                        },
                    },
                },
            ],
        },
        "instructions": {"type": ["string", "null"], "description": "A system message before the input."},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
        "reasoning": {"type": ["object", "null"], "properties": {"effort": _OPTIONAL_TEXT, "summary": _OPTIONAL_TEXT}},
        "text": {
            "type": ["object", "null"],
            "properties": {
                "format": {
                    "type": ["object", "null"],
                    "required": ["type"],
                    "properties": {
                        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
                        "name": _OPTIONAL_TEXT,
                        "schema": _OPTIONAL_OBJECT,
                    },
                },
                "verbosity": _OPTIONAL_TEXT,
            },
        },
        "tools": {
            "type": ["array", "null"],
            "maxItems": TOOLS_LIMIT,
            "items": {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"type": "string", "description": "function: the only kind."},
                    "name": _OPTIONAL_TEXT,
                    "description": _OPTIONAL_TEXT,
                    "parameters": _OPTIONAL_OBJECT,
                },
            },
        },
        "tool_choice": {"type": ["string", "object", "null"]},
        "metadata": {"type": ["object", "null"], "description": "Comes back as it is."},
        "truncation": {
            "type": ["string", "null"],
            "enum": ["auto", "disabled", None],
            "description": "auto is not supported.",
        },
        "store": {"type": ["boolean", "null"], "description": "Ignored: nothing is kept."},
        "user": {"type": ["string", "null"], "maxLength": NAME_LIMIT},
        **{name: {"description": f"Not supported: {why}."} for name, why in _UNSUPPORTED.items()},
    },
}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /v1/chat/completions for one of RESPONSES. Raises ApiError 400 that names an unsupported field."""
    for name, why in _UNSUPPORTED.items():
        if body.get(name) not in (None, False, 0, [], ""):
            raise ApiError(400, f"{name} is not supported: {why}", code="unsupported", param=name)
    if body.get("truncation") == "auto":
        message = "truncation auto is not supported: shorten the input, or leave it out"
        raise ApiError(400, message, code="unsupported", param="truncation")
    if any("logprobs" in str(name) for name in body.get("include") or ()):
        message = "log-probabilities are not supported here: use /v1/chat/completions"
        raise ApiError(400, message, code="unsupported", param="include")
    made: dict[str, Any] = {name: body[name] for name in _SHARED if body.get(name) is not None}
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    made["messages"] = [*system, *_messages(body["input"])]
    if body.get("max_output_tokens") is not None:
        made["max_tokens"] = body["max_output_tokens"]
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None:
        made["reasoning_effort"] = effort
    tools, choice = _tools(body.get("tools") or (), body.get("tool_choice"))
    made |= {"tools": tools} if tools else {}
    made |= {"tool_choice": choice} if choice is not None else {}
    form = (body.get("text") or {}).get("format")
    if form is not None:
        named = {key: form[key] for key in ("name", "schema") if form.get(key) is not None}
        made["response_format"] = {
            "type": form["type"],
            **({"json_schema": named} if form["type"] == "json_schema" else {}),
        }
    return made


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages. Consecutive reasoning, text and calls become one message of the assistant."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(given):
        path = f"input[{at}]"
        kind = item.get("type") or "message"
        if kind == "message":
            message = {"role": _given(item, "role", path), "content": _content(item.get("content"), f"{path}.content")}
            last = _assistant(messages, ("content", "tool_calls")) if message["role"] == "assistant" else None
            if last is None:
                messages.append(message)
            else:
                last["content"] = message["content"]
        elif kind == "reasoning":
            _assistant_for(messages, ("content", "tool_calls", "reasoning_content"))["reasoning_content"] = _joined(
                item.get("content")
            )
        elif kind == "function_call":
            function = {"name": _given(item, "name", path), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id") or item.get("id") or "", "type": "function", "function": function}
            _assistant_for(messages, ()).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{path}.output")
            messages.append({"role": "tool", "tool_call_id": _given(item, "call_id", path), "content": content})
        else:
            message = f"{path}.type is {kind[:40]!r}, which is not supported; use {', '.join(_ITEM_TYPES)}"
            raise ApiError(400, message, code="unsupported", param=f"{path}.type")
    return messages


def _assistant(messages: list[dict[str, Any]], without: Sequence[str]) -> dict[str, Any] | None:
    """The last message, if it is the assistant's and has none of the keys `without`."""
    last = messages[-1] if messages else {"role": ""}
    return last if last["role"] == "assistant" and not any(name in last for name in without) else None


def _assistant_for(messages: list[dict[str, Any]], without: Sequence[str]) -> dict[str, Any]:
    last = _assistant(messages, without)
    if last is None:
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _given(item: Mapping[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not value:
        raise ApiError(400, f"{path}.{name} is missing; give a text", code="missing_field", param=f"{path}.{name}")
    return value


def _content(content: Any, path: str) -> Any:
    """Content in chat form: images are parts of their own, which the chat code accepts or refuses."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, f"{path}[{at}]") for at, part in enumerate(content)]


def _part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": _given(part, "text", path) if part.get("text") != "" else ""}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal") or ""}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = part.get("detail")
        return {
            "type": "image_url",
            "image_url": {"url": part["image_url"], **({} if detail is None else {"detail": detail})},
        }
    message = f"{path} has a type that is not supported; use input_text, or input_image with an image_url"
    raise ApiError(400, message, code="unsupported", param=path)


def _joined(parts: Any) -> str:
    texts = [part.get("text") for part in parts or () if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _tools(given: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """Tools and tool choice in chat form."""
    tools = []
    for at, tool in enumerate(given):
        path = f"tools[{at}]"
        if tool["type"] != "function":
            message = f"{path}.type is {str(tool['type'])[:40]!r}; only tools of the type function are supported"
            raise ApiError(400, message, code="unsupported", param=f"{path}.type")
        function: dict[str, Any] = {"name": _given(tool, "name", path)}
        function |= {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    if isinstance(choice, Mapping):
        return _chosen(tools, choice)
    if choice not in (None, "none", "auto", "required"):
        message = f"tool_choice is {json.dumps(choice)[:40]}; use none, auto, required, or a tool"
        raise ApiError(400, message, code="wrong_value", param="tool_choice")
    return tools, choice


def _chosen(tools: list[dict[str, Any]], choice: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return tools, {"type": "function", "function": {"name": choice["name"]}}
    if (
        choice.get("type") == "allowed_tools"
        and choice.get("mode") in ("auto", "required")
        and isinstance(choice.get("tools"), list)
    ):
        names = {tool.get("name") for tool in choice["tools"] if isinstance(tool, Mapping)}
        return [tool for tool in tools if tool["function"]["name"] in names], choice["mode"]
    message = "tool_choice has a type that is not supported; use function with a name, or allowed_tools"
    raise ApiError(400, message, code="unsupported", param="tool_choice")
