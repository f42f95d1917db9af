"""Translates a request body, checked against schemas.py, to the engine's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..core import CHOICES_LIMIT, PICTURES_LIMIT, Message, ModelSpec, Picture, Request, Sampling, Thinking
from ..errors import RequestError
from ..memory.policy import Policy
from ..text.tool_calls import CLOSE, FRAME, call_schema
from ..vision.encode import picture_of_uri
from .bounded_json import parse
from .error_documents import ApiError
from .schemas import TOOLS_LIMIT

ANY_OBJECT = '{"type":"object"}'
# Pixels of all pictures of a request as they are stored, 3 bytes each in memory: 300 MB.
DECODED_PIXELS = 100_000_000
# Pixels of an image after resizing, by its `detail`; None: the device decides.
DETAIL = {"low": 262_144, "auto": None, "high": 4_194_304}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request: one engine request per prompt, and the shape of the response."""

    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    echo: bool = False
    only_prompt: bool = False
    detail: bool = False
    one_call: bool = False


def spec_of(body: Mapping[str, Any], usual: ModelSpec) -> ModelSpec:
    """The model that a body asks for; what it leaves out is as in `usual`. Without a name it is the service's default
    model."""
    own = _own(body)
    return ModelSpec(body.get("model") or "", whole(own.get("context")), own.get("quant") or usual.quant, usual.device)


def policy_of(body: Mapping[str, Any]) -> Policy | None:
    """When the model gives way from now on; None if the body does not say. Raises RequestError for a ttl without its
    seconds.
    """
    own = _own(body)
    name = own.get("policy")
    return None if name is None else Policy(name, own.get("ttl") if name == "ttl" else None)


def _own(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body.get("onedesk") or {}


def chat_ask(body: Mapping[str, Any], context: int) -> ParsedRequest:
    """A body that matches schemas.CHAT.

    Raises ApiError 400 for what the schema cannot check: image URLs that would have to be fetched, damaged images, tool
    calls that are not JSON.
    """
    options = dict(body.get("chat_template_kwargs") or {})
    thinking = _thinking(body, options)
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    forced = _forced(body.get("tool_choice"), tools)
    schema = _json_schema(body.get("response_format"))
    one_call = body.get("parallel_tool_calls") is False and bool(tools)
    shared = _shared(body, context)
    if one_call and not forced and schema is None:
        shared = replace(shared, stop=(*shared.stop, CLOSE))  # nothing after the first call is wanted
    request = replace(
        shared,
        messages=_messages(body["messages"]),
        thinking=thinking,
        thinking_budget=whole(body.get("thinking_budget")),
        json_schema=call_schema(forced) if forced else schema,
        json_frame=FRAME if forced else ("", ""),
        logprobs=_top_logprobs(body),
        tools=tools,
        template_options=options,
        calls=(1 if one_call else TOOLS_LIMIT) if tools and not forced and schema is not None else 0,
        **_generation_prompt(body),
    )
    detail = bool(_own(body).get("detail"))
    return ParsedRequest((request,), *_streaming(body), tools=tools, detail=detail, one_call=one_call)


def _generation_prompt(body: Mapping[str, Any]) -> dict[str, bool]:
    """How the prompt ends: with the start of an answer, or inside the last message."""
    continues = bool(body.get("continue_final_message"))
    added = body.get("add_generation_prompt")
    if continues and added:
        message = "continue_final_message and add_generation_prompt exclude each other; give one of them"
        raise ApiError(400, message, code="wrong_value", param="add_generation_prompt")
    return {"continue_final_message": continues, "add_generation_prompt": not continues and added is not False}


def completion_ask(body: Mapping[str, Any], context: int) -> ParsedRequest:
    """A body that matches schemas.COMPLETION, as one request per prompt. Raises ApiError 400 for zero tokens without an
    echo of the prompt.
    """
    echo, only_prompt = bool(body.get("echo")), body.get("max_tokens") == 0
    if only_prompt and not echo:
        message = "max_tokens is 0; use a whole number from 1, or echo: true for the prompt alone"
        raise ApiError(400, message, code="wrong_value", param="max_tokens")
    shared = replace(_shared(body, context), logprobs=whole(body.get("logprobs")), best_of=whole(body.get("best_of")))
    shared = replace(shared, parse_special=body.get("parse_special") is not False)
    given = prompts(body["prompt"])
    _check_choices(len(given), max(shared.n, shared.best_of or 1))
    requests = tuple(
        replace(shared, prompt=one) if isinstance(one, str) else replace(shared, ids=_ids(one)) for one in given
    )
    return ParsedRequest(
        requests, *_streaming(body), echo=echo, only_prompt=only_prompt, detail=bool(_own(body).get("detail"))
    )


def _check_choices(count: int, each: int) -> None:
    """Raise ApiError 400 if the prompts together have more choices than one request may have."""
    if count * each > CHOICES_LIMIT:
        message = f"{count} prompts with {each} choices each are {count * each:,}; use at most {CHOICES_LIMIT} in all"
        raise ApiError(400, message, code="wrong_value", param="n")


def prompts(value: Any) -> Sequence[str | Sequence[int]]:
    """The texts or lists of token ids in a `prompt` or `input`, always as a list."""
    if isinstance(value, str) or not isinstance(value[0], str | list):
        return [value]
    return value


def _shared(body: Mapping[str, Any], context: int) -> Request:
    """The options that chat and completions share. max_tokens limits all generated tokens, as in OpenAI's API;
    answer_tokens in our own object limits the answer without its reasoning. Without either, the answer may fill the
    context.
    """
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    sampling = Sampling(
        temperature=body.get("temperature"),
        top_k=whole(body.get("top_k")),
        top_p=body.get("top_p"),
        min_p=body.get("min_p"),
        presence_penalty=body.get("presence_penalty"),
        frequency_penalty=body.get("frequency_penalty"),
        repetition_penalty=body.get("repetition_penalty"),
        logit_bias={int(token): bias for token, bias in (body.get("logit_bias") or {}).items()},
        seed=whole(body.get("seed")),
    )
    total = whole(body.get("max_completion_tokens")) or whole(body.get("max_tokens"))
    return Request(
        sampling=sampling,
        max_tokens=whole(_own(body).get("answer_tokens")) or total or context,
        total_tokens=total or None,
        stop=stop,
        n=whole(body.get("n")) or 1,
        repetition_stop=_own(body).get("repetition_stop"),
    )


def _streaming(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream = bool(body.get("stream"))
    return stream, stream and bool((body.get("stream_options") or {}).get("include_usage"))


def _thinking(body: Mapping[str, Any], options: dict[str, Any]) -> Thinking:
    """The thinking option. Moves enable_thinking out of `options`, the template's variables, and reasoning_effort into
    them.
    """
    asked = options.pop("enable_thinking", None)
    if asked is not None and not isinstance(asked, bool):
        raise ApiError(
            400,
            "enable_thinking is not a truth value; use true or false",
            code="wrong_value",
            param="chat_template_kwargs",
        )
    effort = body.get("reasoning_effort")
    if effort is not None:
        asked = False if effort == "none" and asked is None else asked
        options.setdefault("reasoning_effort", effort)
    return cast(Thinking, {None: "auto", True: "on", False: "off"}[asked])


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The tools of which one must be called."""
    if choice in (None, "none", "auto"):
        return ()
    name = None if choice == "required" else choice["function"]["name"]
    found = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not found:
        raise ApiError(
            400, "tool_choice names no tool of tools; give it, or use auto", code="wrong_value", param="tool_choice"
        )
    return found


def _top_logprobs(body: Mapping[str, Any]) -> int | None:
    top = whole(body.get("top_logprobs"))
    if not body.get("logprobs"):
        if top:
            raise ApiError(400, "top_logprobs goes with logprobs: true", code="wrong_value", param="top_logprobs")
        return None
    return top or 0


def _json_schema(response_format: Mapping[str, Any] | None) -> str | None:
    if response_format is None or response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return ANY_OBJECT
    schema = (response_format.get("json_schema") or {}).get("schema")
    if schema is None:
        param = "response_format.json_schema.schema"
        raise ApiError(400, f"{param} is missing; give a JSON Schema", code="missing_field", param=param)
    return json.dumps(schema)


def _messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages with their pictures decoded, one after the other, within the limits of one request."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    count = sum(part.get("type") == "image_url" for part in parts)
    if count > PICTURES_LIMIT:
        text = f"the request has {count} pictures; at most {PICTURES_LIMIT} are read at once"
        raise ApiError(400, text, code="wrong_picture", param="messages")
    found, pixels = list[Message](), 0
    for at, message in enumerate(messages):
        found.append(_message(message, f"messages[{at}]", DECODED_PIXELS - pixels))
        pixels += sum(picture.width * picture.height for picture in found[-1].pictures)
    return tuple(found)


def _message(message: Mapping[str, Any], path: str, pixels: int) -> Message:
    calls = tuple(
        _tool_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(message.get("tool_calls") or ())
    )
    parts = _content(message.get("content"), f"{path}.content", pixels)
    return Message(
        "system" if message["role"] == "developer" else message["role"],
        "".join(part for part in parts if isinstance(part, str)),
        message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id") or "",
        parts=parts if any(isinstance(part, Picture) for part in parts) else (),
    )


def _content(content: Any, path: str, pixels: int) -> tuple[str | Picture, ...]:
    if content is None or isinstance(content, str):
        return (content or "",)
    found = list[str | Picture]()
    for at, part in enumerate(content):
        found.append(one := _part(part, f"{path}[{at}]"))
        if isinstance(one, Picture):
            pixels -= one.width * one.height
        if pixels < 0:
            text = f"the pictures of the request have more than {DECODED_PIXELS:,} pixels; send fewer or smaller ones"
            raise ApiError(400, text, code="wrong_picture", param=path)
    return tuple(found)


def _part(part: Mapping[str, Any], path: str) -> str | Picture:
    kind = part["type"]
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if text is None:
            raise ApiError(400, f"{path}.{kind} is missing; give a text", code="missing_field", param=path)
        return text
    if kind != "image_url":
        raise ApiError(
            400, f"{path} has a type that is not known; use text or image_url", code="unsupported", param=path
        )
    picture = part.get("image_url")
    url, detail = (picture.get("url"), picture.get("detail")) if isinstance(picture, dict) else (picture, None)
    if not isinstance(url, str):
        raise ApiError(400, f"{path}.image_url.url is missing; give a data: URL", code="missing_field", param=path)
    if detail is not None and (not isinstance(detail, str) or detail not in DETAIL):
        raise ApiError(400, f"{path}.image_url.detail is not one of low, high and auto", code="wrong_value", param=path)
    try:
        found = picture_of_uri(url, path)
    except RequestError as error:
        raise ApiError(400, str(error), code="wrong_picture", param=path) from error
    return replace(found, pixels=DETAIL[detail or "auto"])


def _tool_call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A tool call as templates read it: the arguments are an object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments.encode("utf-8", "surrogatepass"))
        except RecursionError as error:
            raise ApiError(
                400, f"{path}.function.arguments is nested too deeply", code="wrong_value", param=path
            ) from error
        except ValueError as error:
            raise ApiError(
                400, f"{path}.function.arguments is not valid JSON: {error}", code="wrong_value", param=path
            ) from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{path}.function.arguments is not an object", code="wrong_value", param=path)
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _ids(numbers: Sequence[float]) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def whole(value: float | None) -> int | None:
    """A JSON number that was checked to be whole, as an int."""
    return None if value is None else int(value)
