"""From a conversation to the prompt that a model reads: the chat template's text, and its token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core import CancelCheck, Message, Thinking
from ..errors import RequestError
from .protected_text import AddedTokens, ProtectedText
from .reasoning import CLOSE, OPEN, opens_reasoning
from .template import ChatTemplate

# Whose content is protected from all added tokens. A system message is the developer's own and may name `<tool_call>`,
# and templates look for `</think>` in what an assistant said; both are protected from control tokens alone.
_FOREIGN_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the model reads it. `begun` is the text that the answer continues, empty for a new answer."""

    text: str
    ids: Sequence[int]
    in_reasoning: bool
    thoughts_closed: bool
    begun: str = ""


def render_conversation(
    template: ChatTemplate,
    tokens: AddedTokens,
    messages: Sequence[Message],
    *,
    thinking: Thinking = "auto",
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    check: Callable[[str], None] | None = None,
    cancel: CancelCheck | None = None,
) -> RenderedPrompt:
    """The prompt for `messages`, up to where the answer begins.

    Texts of control tokens in messages and tools stay text. A template that refuses several system messages, or one
    that comes later, gets them merged into one, as it does messages of a developer. With `continue_final_message` the
    answer goes on in the last message, in its reasoning where that is all it has. `check` may refuse the text before it
    is tokenized. Raises RequestError for messages that the template refuses, in its own words, ModelError and Cancelled
    as ChatTemplate.render.
    """
    if continue_final_message and not (messages and (messages[-1].content or messages[-1].reasoning)):
        raise RequestError(
            "continue_final_message needs a last message with content or reasoning; add one, or leave it out"
        )
    protected = ProtectedText(tokens, [*map(_parts, messages), tools, options or {}])
    final = messages[-1] if continue_final_message else None
    prepared = [_protected(protected, message) for message in messages]
    if final is not None:
        last = prepared[-1]
        ended = (
            {"content": last.content + protected.end}
            if final.content
            else {"reasoning": last.reasoning + protected.end}
        )
        prepared[-1] = replace(last, **ended)
    extra = dict(protected.protect(options or {}, visible=False))
    if tools:
        extra["tools"] = protected.protect(tools, visible=True)
    asked = {
        "thinking": thinking,
        "extra": extra,
        "add_generation_prompt": add_generation_prompt and final is None,
        "cancel": cancel,
    }
    rendered = _render(template, prepared, asked)
    in_reasoning = opens_reasoning(rendered)
    if final is not None:
        rendered = _cut(rendered, protected.end)
        in_reasoning = _thinks_on(final)
    if check is not None:
        check(rendered)
    return RenderedPrompt(
        text=protected.plain(rendered),
        ids=protected.encode(rendered),
        in_reasoning=in_reasoning,
        thoughts_closed=rendered.rstrip().endswith(CLOSE) or (final is not None and not in_reasoning),
        begun="" if final is None or in_reasoning else final.content.rpartition(CLOSE)[2].lstrip("\n"),
    )


def merged_system(messages: Sequence[Message]) -> list[Message]:
    """The conversation with all its system messages as one, the first."""
    system = [message for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    text = "\n\n".join(message.content for message in system if message.content)
    return [Message("system", text), *others] if system else others


def _render(template: ChatTemplate, messages: Sequence[Message], asked: Mapping[str, Any]) -> str:
    try:
        return template.render(messages, **asked)
    except RequestError:
        merged = merged_system(messages)
        if merged == list(messages):
            raise
        return template.render(merged, **asked)


def _parts(message: Message) -> list[Any]:
    return [message.role, message.content, message.reasoning, message.tool_calls, message.tool_call_id]


def _protected(protected: ProtectedText, message: Message) -> Message:
    visible = message.role in _FOREIGN_ROLES
    return replace(
        message,
        role="system" if message.role == "developer" else protected.protect(message.role, visible=True),
        content=protected.protect(message.content, visible=visible),
        reasoning=protected.protect(message.reasoning, visible=True),
        tool_calls=tuple(protected.protect(message.tool_calls, visible=True)),
        tool_call_id=protected.protect(message.tool_call_id, visible=True),
    )


def _cut(rendered: str, end: str) -> str:
    at = rendered.rfind(end)
    if at < 0:
        raise RequestError(
            "the chat template leaves out the last message, so it cannot be continued; leave continue_final_message out"
        )
    return rendered[:at].replace(end, "")


def _thinks_on(final: Message) -> bool:
    """Whether the message to continue ends inside its thoughts."""
    if not final.content:
        return True
    return final.content.rfind(OPEN) > final.content.rfind(CLOSE)
