"""A checkpoint's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..core import CancelCheck, Message, Thinking
from ..errors import Cancelled, FileError, ModelError, RequestError
from ..loader.files import exists_at_all, read_whole
from ..loader.json_files import read_json_object
from .jinja_process import ChildEndedError, JinjaProcess, RenderLimits

SOURCE_LIMIT = 2**20  # bytes of a template; Qwen's have 4 to 8 KB
_SAFE_JINJA = (3, 1, 6)  # earlier ones have known ways out of the sandbox
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_WHERE = "chat_template.jinja, or tokenizer_config.json with a chat_template in it"


class ChatTemplate:
    """Renders messages by a template of transformers' jinja dialect, in a process of its own (see jinja_process.py)."""

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        origin: str = "the chat template",
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        """`templates` by name; "default" is the one used, "tool_use", where there is one, when tools are given.
        `origin` is the file named in errors. Raises ModelError without a default or where jinja2 is too old to be
        safe."""
        if "default" not in templates:
            names = ", ".join(sorted(templates)) or "none"
            raise ModelError(f"{origin} has no template called default (found: {names}); name one of them default")
        _require_safe_jinja()
        self._templates = dict(templates)
        self._origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()
        self._process = JinjaProcess(self._limits)

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        thinking: Thinking = "auto",
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        cancel: CancelCheck | None = None,
    ) -> str:
        """The prompt for `messages` (Message, or mappings as the OpenAI API has them, for tool calls and content
        parts).

        thinking on and off pass enable_thinking, auto passes nothing. `extra` are further variables: tools,
        reasoning_effort, preserve_thinking, ... Raises RequestError where the template refuses the messages in its own
        words, ModelError where the template is at fault: its grammar, the sandbox, or a limit of time, memory or
        length; Cancelled once `cancel()` is true.
        """
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        if thinking != "auto":
            values["enable_thinking"] = thinking == "on"
        values |= dict(extra or {})
        values |= {
            "messages": [_as_mapping(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        source = self._templates["default"]
        if values["tools"] is not None:
            source = self._templates.get("tool_use", source)
        try:
            answer = self._process.render(source, values, cancel)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the messages or template options cannot be written as JSON: {error}") from error
        except ChildEndedError as error:
            if error.why == "cancelled":
                raise Cancelled("stopped while the chat template was rendered") from error
            raise ModelError(self._limit_message(error)) from error
        if "text" in answer:
            return answer["text"]
        raise self._error(answer)

    def close(self) -> None:
        """End this template's process; a later render starts a new one."""
        self._process.close()

    def _error(self, answer: Mapping[str, Any]) -> ModelError | RequestError:
        kind, message, line = answer["error"], answer["message"], answer["line"]
        source = f"{self._origin}, line {line}" if line else self._origin
        if kind == "raised":
            return RequestError(f"the model's chat template refuses these messages: {message}")
        if kind == "syntax":
            return ModelError(
                f"{source}: the chat template does not compile: {message}; get it again from the model's own repository"
            )
        if kind == "sandbox":
            return ModelError(
                f"{source}: the chat template reaches out of its sandbox ({message}); "
                "use the template of the model's maker"
            )
        if kind == "long":
            limit = self._limits.text
            return ModelError(
                f"{source}: the chat template writes more than {limit:,} bytes; "
                "shorten the messages or repair the template"
            )
        if kind == "memory":
            return ModelError(f"{source}: {self._memory_message()}")
        return ModelError(f"{source}: the chat template fails on these messages: {message}")

    def _limit_message(self, ended: ChildEndedError) -> str:
        if ended.why == "time":
            return (
                f"{self._origin}: the chat template was not done after {self._limits.seconds:g} s and was ended; "
                "if it loops for ever, take the template of the model's maker, else shorten the messages"
            )
        if ended.why == "memory":
            return f"{self._origin}: {self._memory_message()}"
        return (
            f"{self._origin}: the process that renders the chat template ended by itself (status {ended.status}); "
            "repair the template"
        )

    def _memory_message(self) -> str:
        mib = self._limits.memory // 2**20
        return f"the chat template takes more than {mib:,} MiB of memory; shorten the messages or repair it"


def _as_mapping(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """The keys that templates read: none whose value is None, and the reasoning under both names in use."""
    if isinstance(message, Message):
        fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = list(message.tool_calls)
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
    else:
        fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING_KEYS if key in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _content(message: Message) -> str | list[dict[str, str]]:
    """The text, or the parts of a turn with pictures as templates read them."""
    if not message.pictures:
        return message.content
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]


def load_template(folder: Path, *, limits: RenderLimits | None = None) -> ChatTemplate:
    """Read the template of a checkpoint folder: chat_template.jinja, else "chat_template" of tokenizer_config.json or
    chat_template.json. Raises ModelError that says which file to add or what is wrong with it."""
    config = _read_json(folder / "tokenizer_config.json")
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    path = folder / "chat_template.jinja"
    if exists_at_all(path):
        return ChatTemplate(
            {"default": _read_text(path)}, origin=f"{folder.name}/{path.name}", special_tokens=special, limits=limits
        )
    for name, document in (
        ("tokenizer_config.json", config),
        ("chat_template.json", _read_json(folder / "chat_template.json")),
    ):
        if document.get("chat_template"):
            origin = f"{folder.name}/{name}"
            return ChatTemplate(
                _named(document["chat_template"], origin), origin=origin, special_tokens=special, limits=limits
            )
    raise ModelError(f"{folder.name}: no chat template; add {_WHERE}, from the model's own repository")


def _named(value: object, origin: str) -> dict[str, str]:
    """Templates by name from "chat_template": one text, or a list of {"name", "template"}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        value = [{"name": name, "template": template} for name, template in value.items()]
    entries = value if isinstance(value, list) else [None]
    found = {}
    for entry in entries:
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(
                f'{origin}: chat_template is neither a text nor a list of {{"name", "template"}}; '
                "take the maker's file"
            )
        found[name] = template
    return found


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not exists_at_all(path):
        return {}
    try:
        return read_json_object(path, f"{path.parent.name}/{path.name}")
    except FileError as error:
        raise ModelError(str(error)) from error


def _read_text(path: Path) -> str:
    shown = f"{path.parent.name}/{path.name}"
    try:
        return read_whole(path, shown, SOURCE_LIMIT).decode("utf-8-sig")
    except FileError as error:
        raise ModelError(str(error)) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{shown} is not UTF-8 at byte {error.start}; download it again") from error


def _require_safe_jinja() -> None:
    found = version("jinja2")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < _SAFE_JINJA:
        raise ModelError(
            f"jinja2 {found} has known ways out of its sandbox; install 3.1.6 or newer (pip install -U jinja2)"
        )
