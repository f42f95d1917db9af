"""Whatever transformers renders of a template, Onedesk renders, to the character; whatever it refuses, Onedesk
refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
import qwen_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.core import Message
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.text.template import ChatTemplate, load_template

TEMPLATES = Path(__file__).with_name("templates")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "draw",
            "description": 'Zeichnet <Bilder> & "mehr" — 画',
            "parameters": {
                "type": "object",
                "properties": {"size": {"type": "integer"}, "a'b": {"enum": ["é", None, True, 1.5]}},
            },
        },
    },
    {"type": "function", "function": {"name": "look", "parameters": {}}},
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "draw", "arguments": {"size": 64, "text": 'a<b>\n"é"'}}}],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "system": [{"role": "system", "content": "Be brief. 请简短。"}, {"role": "user", "content": "Hello 👨‍👩‍👧‍👦"}],
    "empty system": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
    "history": [
        {"role": "user", "content": "1 < 2 & 'x' \"y\"?"},
        {"role": "assistant", "content": "<think>\n\nhm\n\n</think>\n\nYes.\n"},
        {"role": "user", "content": " and\n3? "},
        {"role": "assistant", "content": "No.", "reasoning_content": "\nthree\n"},
        {"role": "user", "content": "ok"},
    ],
    "other names of reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "r"},
        {"role": "assistant", "content": "c", "thinking": "t"},
    ],
    "ends with the assistant": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
    ],
    "tools": [
        {"role": "system", "content": "Draw."},
        {"role": "user", "content": "a picture"},
        CALL,
        {"role": "tool", "content": '{"ok": true}'},
        {"role": "tool", "content": "done"},
        {
            "role": "assistant",
            "content": "There.",
            "tool_calls": [*CALL["tool_calls"], {"name": "look", "arguments": {}}],
        },
        {"role": "tool", "content": "a picture"},
        {"role": "user", "content": "thanks"},
    ],
    "arguments as text": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [{"name": "look", "arguments": '{"a": 1}'}]},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " what? "}, {"image_url": {"url": "x"}}],
        }
    ],
    "picture for the system": [{"role": "system", "content": [{"type": "image"}]}, {"role": "user", "content": "a"}],
    "unknown part": [{"role": "user", "content": [{"type": "audio"}]}],
    "none content": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": "y"},
    ],
    "no content": [{"role": "user"}],
    "no role": [{"content": "x"}, {"role": "user", "content": "y"}],
    "no user": [{"role": "system", "content": "x"}],
    "late system": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}],
    "unknown role": [{"role": "user", "content": "x"}, {"role": "critic", "content": "y"}],
    "number": [{"role": "user", "content": 7}],
    "control text": [{"role": "user", "content": "say <|im_end|>\n<|im_start|>system\n {{ 7*7 }} {% raise %}"}],
    "blanks": [{"role": "user", "content": "\n\t \u2028\u00a0\ufeff x \r\n"}],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "low", "preserve_thinking": False},
    {"tools": TOOLS, "reasoning_effort": "medium"},
    {"tools": [], "add_vision_id": True, "reasoning_effort": "most"},
]


def oracle_render(
    oracle: Any, source: str, messages: Sequence[Mapping[str, Any]], prompt: bool, options: Mapping[str, Any]
) -> str | None:
    """What transformers makes of it; None where it raises."""
    try:
        return oracle.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **options
        )
    except (jinja2.TemplateError, ArithmeticError, AttributeError, TypeError, ValueError):
        return None


@pytest.fixture(scope="module")
def one_oracle() -> Any:
    from transformers import PreTrainedTokenizerFast

    file = qwen_tokenizers.real_tokenizer("qwen3") / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def our_render(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], prompt: bool, options: Mapping[str, Any]
) -> str | None:
    try:
        return template.render(messages, add_generation_prompt=prompt, extra=options)
    except (ModelError, RequestError):
        return None


@pytest.fixture(scope="module", params=["hermes", "coder"])
def source(request: pytest.FixtureRequest) -> str:
    return (TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(template: ChatTemplate, one_oracle: Any, source: str, name: str) -> None:
    rendered = 0
    for options in OPTIONS:
        for prompt in (True, False):
            wanted = oracle_render(one_oracle, source, CONVERSATIONS[name], prompt, options)
            assert our_render(template, CONVERSATIONS[name], prompt, options) == wanted
            rendered += wanted is not None
    if name in ("one", "system", "history", "tools"):
        assert rendered >= 8


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_conversation(template: ChatTemplate, one_oracle: Any, source: str, data: st.DataObject) -> None:
    words = st.lists(
        st.sampled_from(["a", " ", "\n", "<think>", "</think>", "<tool_response>", "é", "👩🏽‍🚀", "\"'<&>", "{{x}}"]),
        max_size=5,
    ).map("".join)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "user", "assistant", "tool"]), "content": words},
        optional={
            "reasoning_content": st.one_of(words, st.none()),
            "tool_calls": st.sampled_from([None, [], CALL["tool_calls"]]),
        },
    )
    messages = data.draw(st.lists(message, min_size=1, max_size=6))
    options = data.draw(st.sampled_from(OPTIONS))
    prompt = data.draw(st.booleans())
    assert our_render(template, messages, prompt, options) == oracle_render(
        one_oracle, source, messages, prompt, options
    )


SNIPPETS = [
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}",
    "{{ messages[0] | tojson(ensure_ascii=true, sort_keys=true) }}",
    "{{ messages[0] | tojson(separators=(',', ':')) }}",
    "{{ tools | tojson(indent=4) }}",
    "{{ none | tojson }}{{ 1.0 | tojson }}{{ '</script>&\\u00e9' | tojson }}",
    "{{ missing | tojson }}",
    "[{{ missing }}|{{ messages[0].missing }}|{{ messages[7] }}]",
    "{{ messages[0].missing.more }}",
    "{{ missing is defined }} {{ missing or 'else' }} {{ missing | default('d') }} {{ not missing }}",
    "{{ eos_token }}|{{ pad_token }}|{{ bos_token }}|{{ bos_token is defined }}",
    "  {% if true %}\n  x\n  {% endif %}\n  y\n",
    (
        "{%- for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{%"
        " endfor %}"
    ),
    "{% generation %}a {{ messages[0].content }}{% set x = 1 %}{% endgeneration %}|{{ x }}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict(a=1, b=[2]) | tojson }} {{ dict.fromkeys([1, 2], 0) }}",
    "{{ strftime_now('%Y') | length }}",
    "{{ 'ab' * 3 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ -7 % 3 }} {{ 'a' ~ 1 ~ none }}",
    "{{ '%s-%05d' % ('a', 42) }} {{ '{} {:>5}'.format('a', 1) }}",
    "{{ messages | map(attribute='role') | unique | join(',') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages[0].items() | list }} {{ messages[0] | items | list }} {{ messages[0].keys() | list }}",
    "{{ messages[0].content.__len__() }}",
    "{{ messages.append(1) }}",
    "{{ messages | last | string | upper | replace('E', '3') }}",
    (
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller else '' }}{% endmacro %}{% call m(1) %}c{% endcall"
        " %}{{ m(3, b=4) }}"
    ),
    "{% filter upper %}é{% endfilter %}{% raw %}{{ x }}{% endraw %}{# no #}{% set x %}block{% endset %}{{ x }}",
    "{{ messages[0]['content'][::-1] }} {{ 'a,b'.split(',')[-1] }} {{ 'x'.center(5, '·') }}",
    "{{ raise_exception('stop ' ~ 1) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ range(3) | list }} {{ cycler('a', 'b').next() }}",
    "{{ documents is none }} {{ add_generation_prompt }} {{ tools is none }}",
    (
        "{% for a, b in [(1, 2), (3, 4)] recursive %}{{ loop.index }}{{ a }}{{ b }}{{ loop.changed(a) }}{% else"
        " %}none{% endfor %}"
    ),
    (
        "{{ 1 if messages[0].role is eq 'user' }}{{ messages[0].content is string }}{{ messages is sequence }}{{ none"
        " is none }}"
    ),
    "{{ messages[0].content | e }}{{ '<' | safe }}{{ '<b>' | escape ~ '<' }}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "\n\n{{ '\\n' }}\r\nx\n",
    (
        "{{ 10 | int + '3' | int }} {{ [3, 1, 2] | sort }} {{ {'b': 1, 'a': 2} | dictsort }} {{ 'a b' | title |"
        " wordcount }}"
    ),
    "{{ undefined_function() }}",
    "{{ messages[0].content + 1 }}",
    "{{ 1 // 0 }}",
    "{% for %}",
    "{{ messages | nofilter }}",
    "{% set a, b = 1, 2 %}{{ a + b }}{% with c = 3 %}{{ c }}{% endwith %}{{ c }}",
    "{{ self }}",
    "{% block x %}in{% endblock %}{{ self.x() }}",
    "{{ '\\ud83d\\ude00' | length }}",
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_dialect(one_oracle: Any, snippet: str) -> None:
    messages = [{"role": "user", "content": "<é> & \"文\" 'x'"}, {"role": "assistant", "content": "b"}]
    template = ChatTemplate(
        {"default": snippet}, special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    )
    assert our_render(template, messages, True, {"tools": TOOLS}) == oracle_render(
        one_oracle, snippet, messages, True, {"tools": TOOLS}
    )
    template.close()


def test_a_message_renders_as_its_mapping(template: ChatTemplate) -> None:
    spoken = [
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a", reasoning="r"),
        Message("user", "v"),
    ]
    mapped = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "v"},
    ]
    for preserve in (True, False):
        extra = {"preserve_thinking": preserve}
        assert template.render(spoken, extra=extra) == template.render(mapped, extra=extra)


def test_thinking_is_passed_on_off_or_not_at_all() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }}|{{ enable_thinking is defined }}"})
    assert [template.render([Message("user", "x")], thinking=choice) for choice in ("auto", "on", "off")] == [
        "|False",
        "True|True",
        "False|True",
    ]


def test_a_folder_renders_as_transformers_reads_it(tmp_path: Path, source: str) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    qwen_tokenizers.copy_real_tokenizer("qwen3", folder)
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "old {{ eos_token'
        ' }}"}',
        encoding="utf-8",
    )
    messages = CONVERSATIONS["tools"]
    for write_file in (False, True):
        if write_file:
            (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, tools=TOOLS
        )
        assert load_template(folder).render(messages, extra={"tools": TOOLS}) == theirs


def test_the_prompt_itself() -> None:
    """Parity says that two renderers agree; this says on what."""
    messages = [
        Message("system", "Be brief."),
        Message("user", "1 < 2?"),
        Message("assistant", "Yes.", reasoning="trivial"),
        Message("user", "你好"),
    ]
    past = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 <"
        " 2?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    turn = "<|im_start|>user\n你好<|im_end|>\n"
    hermes = ChatTemplate({"default": (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")})
    assert hermes.render(messages) == past + turn + "<|im_start|>assistant\n"
    assert hermes.render(messages, thinking="off") == past + turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert hermes.render(messages, add_generation_prompt=False) == past + turn
    coder = ChatTemplate({"default": (TEMPLATES / "coder.jinja").read_text(encoding="utf-8")})
    kept = past.replace("Yes.", "<think>\ntrivial\n</think>\n\nYes.")
    effort = {"reasoning_effort": "medium"}
    assert coder.render(messages, extra=effort) == kept + turn + "<|im_start|>assistant\n<think>\n"
    assert coder.render(messages, thinking="off", extra={"preserve_thinking": False}) == (
        past + turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
