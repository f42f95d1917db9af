"""What each route accepts, as JSON Schema. `check` validates requests with it, and the OpenAPI document shows it. null
counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import CHOICES_LIMIT, LOGPROBS_LIMIT, QUANTIZATIONS

NAME_LIMIT = 512
INPUTS_LIMIT = 2048  # texts per embeddings request
DOCUMENTS_LIMIT = 1024  # documents per rerank request
TOOLS_LIMIT = 256  # tools per request, calls per message
MESSAGES_LIMIT, PARTS_LIMIT = 10_000, 1024  # messages per conversation, parts per message
STOPS_LIMIT, BIASES_LIMIT = 10_000, 10_000


def _optional(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": [kind, "null"], **more}


_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
_MODEL = _optional(
    "string", minLength=1, maxLength=NAME_LIMIT, description="A name of /v1/models; left out: the default."
)


def _texts_or_ids(most: int) -> dict[str, Any]:
    """One text, one list of token ids, or a list of either."""
    lists = [{"type": "array", "items": item, "minItems": 1, "maxItems": most} for item in (_TEXT, _TOKEN_IDS)]
    return {"anyOf": [_TEXT, _TOKEN_IDS, *lists]}


OWN = _optional(
    "object",
    properties={
        "context": _optional(
            "integer",
            minimum=2,
            maximum=2**31 - 1,
            description="Tokens for prompt and answer; their memory is reserved.",
        ),
        "quant": _optional("string", enum=[*QUANTIZATIONS, None]),
        "policy": _optional(
            "string", enum=["stay", "ttl", "pinned", None], description="When the model gives way from now on."
        ),
        "ttl": _optional("number", minimum=0, maximum=7 * 86400, description="Seconds, for the policy ttl."),
        "answer_tokens": _optional("integer", minimum=1, description="Tokens of the answer, its thoughts not counted."),
        "repetition_stop": _optional("boolean"),
        "detail": _optional(
            "boolean", description="Streams also tell token ids, the progress of a load, and each choice's usage."
        ),
    },
    # A body may contain other servers' fields, but this object only has ours: an unknown field in it is a mistake.
    additionalProperties=False,
    description="What OpenAI's API has no field for.",
)
# Shared by chat and plain completions.
_SAMPLING: dict[str, Any] = {
    "max_tokens": _optional("integer", minimum=1, description="Tokens of all that is generated, thoughts included."),
    "temperature": _optional(
        "number", minimum=0, description="0 is greedy; left out: the model's own default, as all of these."
    ),
    "top_p": _optional("number", minimum=0, maximum=1),
    "top_k": _optional("integer", minimum=0),
    "min_p": _optional("number", minimum=0, maximum=1),
    "presence_penalty": _optional("number", minimum=-2, maximum=2),
    "frequency_penalty": _optional("number", minimum=-2, maximum=2),
    "repetition_penalty": _optional("number", minimum=0),
    "seed": _optional("integer", minimum=0, maximum=2**64 - 1, description="Choice i of n is drawn with seed + i."),
    "n": _optional("integer", minimum=1, maximum=CHOICES_LIMIT),
    "stop": {"anyOf": [{"type": "null"}, _TEXT, {"type": "array", "items": _TEXT, "maxItems": STOPS_LIMIT}]},
    "logit_bias": _optional(
        "object",
        propertyNames={"type": "string", "pattern": "^[0-9]{1,9}$", "examples": ["1234"]},
        additionalProperties={"type": "number"},
        maxProperties=BIASES_LIMIT,
        description="Token ids to what is added to their scores.",
    ),
    "stream": _optional("boolean"),
    "stream_options": _optional("object", properties={"include_usage": _optional("boolean")}),
    "user": _optional("string"),
    "onedesk": OWN,
}

_PART = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "description": "text or image_url"},
        "text": _optional("string"),
        "refusal": _optional("string"),
        "image_url": {
            "type": ["object", "string", "null"],
            "properties": {"url": _optional("string"), "detail": _optional("string")},
            "description": (
                "A picture as a data: URL in base64 (PNG, JPEG, WEBP, GIF, BMP, TIFF), for a model that sees; nothing"
                " is ever fetched. At most 64 MiB and 67,108,864 pixels each, 64 of them in a request, in a body of 32"
                " MiB. detail: low reads 262,144 pixels, high 4,194,304, auto 1,048,576 on a GPU and 262,144 on a CPU."
            ),
        },
    },
}
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": _optional("string"),
        "type": _optional("string"),
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "arguments": {"type": ["string", "object", "null"]}},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _PART, "maxItems": PARTS_LIMIT}]
        },
        "reasoning_content": _optional("string", description="What an assistant turn thought."),
        "reasoning": _optional("string", description="The same as reasoning_content."),
        "tool_calls": _optional("array", items=_TOOL_CALL, maxItems=TOOLS_LIMIT),
        "tool_call_id": _optional("string"),
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": _TEXT, "description": _optional("string"), "parameters": _optional("object")},
        },
    },
}
_RESPONSE_FORMAT = _optional(
    "object",
    required=["type"],
    properties={
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": _optional("object", properties={"name": _optional("string"), "schema": _optional("object")}),
    },
)
_TOOL_CHOICE = {
    "anyOf": [
        {"type": "null"},
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["function"],
            "properties": {"function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}}},
        },
    ]
}

CHAT: Mapping[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": _MODEL,
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MESSAGES_LIMIT},
        **_SAMPLING,
        "max_completion_tokens": _optional("integer", minimum=1, description="The same as max_tokens."),
        "logprobs": _optional("boolean"),
        "top_logprobs": _optional("integer", minimum=0, maximum=LOGPROBS_LIMIT),
        "response_format": _RESPONSE_FORMAT,
        "tools": _optional("array", items=_TOOL, maxItems=TOOLS_LIMIT),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _optional("boolean", description="false: at most one call."),
        "add_generation_prompt": _optional("boolean", description="false: without the template's start of an answer."),
        "continue_final_message": _optional("boolean", description="true: the answer goes on in the last message."),
        "thinking_budget": _optional("integer", minimum=0, description="Tokens of reasoning, within max_tokens."),
        "reasoning_effort": _optional(
            "string", description="none turns thinking off; anything else goes to the template."
        ),
        "chat_template_kwargs": _optional(
            "object", description="Further variables of the chat template, such as enable_thinking."
        ),
    },
}

COMPLETION: Mapping[str, Any] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "model": _MODEL,
        "prompt": _texts_or_ids(CHOICES_LIMIT),
        **_SAMPLING,
        "max_tokens": _optional(
            "integer", minimum=0, description="Tokens of the answer; 0, with echo: only the prompt comes back."
        ),
        "logprobs": _optional("integer", minimum=0, maximum=LOGPROBS_LIMIT),
        "best_of": _optional("integer", minimum=1, maximum=CHOICES_LIMIT),
        "echo": _optional("boolean"),
        "parse_special": _optional("boolean", description="false: texts of control tokens in the prompt stay text."),
        "suffix": _optional("string", maxLength=0, description="Not supported: leave it out or empty."),
    },
}

EMBEDDINGS: Mapping[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": _MODEL,
        "input": _texts_or_ids(INPUTS_LIMIT),
        "encoding_format": _optional("string", enum=["float", "base64", None]),
        "dimensions": _optional(
            "integer", minimum=1, description="The first so many numbers, scaled to length 1 again."
        ),
        "instruction": _optional(
            "string", description="The task, for the texts of queries: Instruct: TASK, then Query:TEXT."
        ),
        "user": _optional("string"),
        "onedesk": OWN,
    },
}

RERANK: Mapping[str, Any] = {
    "type": "object",
    "required": ["query", "documents"],
    "properties": {
        "model": _MODEL,
        "query": _TEXT,
        "documents": {
            "type": "array",
            "minItems": 1,
            "maxItems": DOCUMENTS_LIMIT,
            "items": {"anyOf": [_TEXT, {"type": "object", "required": ["text"], "properties": {"text": _TEXT}}]},
        },
        "top_n": _optional("integer", minimum=1, description="The first so many results; left out: all."),
        "return_documents": _optional("boolean", description="true: each result has its document."),
        "max_tokens_per_doc": _optional(
            "integer", minimum=1, description="A longer document is cut to so many tokens; left out: it is refused."
        ),
        "instruction": _optional("string", description="The task in words; left out: that of a web search."),
        "onedesk": OWN,
    },
}

RELEASE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "owner": _optional(
            "string", minLength=1, maxLength=NAME_LIMIT, description="A name of the leases: let it give way."
        ),
        "context": (
            OWN["properties"]["context"] | {"description": "With owner: only the model that was opened with so much."}
        ),
        "quant": OWN["properties"]["quant"] | {"description": "With owner: only the model in this form."},
        "bytes": _optional(
            "integer", minimum=1, maximum=2**50, description="Let owners give way until so much more can be leased."
        ),
    },
}

POLICY: Mapping[str, Any] = {
    "type": "object",
    "required": ["owner", "policy"],
    "properties": {
        "owner": {"type": "string", "minLength": 1, "maxLength": NAME_LIMIT, "description": "The name of a model."},
        "policy": {"type": "string", "enum": ["stay", "ttl", "pinned"]},
        **{name: OWN["properties"][name] for name in ("ttl", "context", "quant")},
    },
}

NOTHING: Mapping[str, Any] = {"type": "object"}

SLEEP: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "wake": _optional(
            "string",
            enum=["request", "manual", None],
            description="What wakes it: the next request (the default), or /v1/memory/wake alone.",
        ),
    },
}

LEASE: Mapping[str, Any] = {
    "type": "object",
    "required": ["owner", "bytes"],
    "properties": {
        "owner": {"type": "string", "minLength": 1, "maxLength": NAME_LIMIT},
        "bytes": {"type": "integer", "minimum": 1, "maximum": 2**50, "description": "What it will take in all."},
        "held": _optional("integer", minimum=0, maximum=2**50, description="What it has taken already."),
        "heartbeat": _optional(
            "number",
            minimum=0.2,
            maximum=3600,
            description="Seconds after which the lease ends without a sign of life.",
        ),
        "gives_way": _optional(
            "boolean", description="Whether it may be asked, in the answer to a heartbeat, to give bytes back."
        ),
    },
}

HEARTBEAT_OF_LEASE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "held": _optional("integer", minimum=0, maximum=2**50),
        "bytes": _optional("integer", minimum=1, maximum=2**50),
    },
}
