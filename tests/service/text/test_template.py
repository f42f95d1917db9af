from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from onedesk.service.core import Message
from onedesk.service.errors import ModelError, RequestError
from onedesk.service.text import jinja_process
from onedesk.service.text import template as template_module
from onedesk.service.text.jinja_process import RenderLimits
from onedesk.service.text.template import SOURCE_LIMIT, ChatTemplate, load_template

HELLO = [Message("user", "Hello")]
SHORT = RenderLimits(seconds=0.7)


def render(source: str, limits: RenderLimits | None = None, messages: list[Any] | None = None) -> str:
    template = ChatTemplate({"default": source}, origin="Model/chat_template.jinja", limits=limits)
    try:
        return template.render(messages or HELLO)
    finally:
        template.close()


# Folders


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"chat_template.jinja": "A {{ messages[0].content }}"}, "A Hello"),
        ({"chat_template.jinja": "\ufeffA"}, "A"),
        ({"chat_template.jinja": "A", "tokenizer_config.json": '{"chat_template": "B"}'}, "A"),
        (
            {"tokenizer_config.json": '{"chat_template": "B {{ eos_token }}", "eos_token": {"content": "<|im_end|>"}}'},
            "B <|im_end|>",
        ),
        (
            {
                "tokenizer_config.json": (
                    '{"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}'
                )
            },
            "D",
        ),
        ({"tokenizer_config.json": '{"chat_template": {"default": "D", "tool_use": "T"}}'}, "D"),
        ({"tokenizer_config.json": "{}", "chat_template.json": '{"chat_template": "J"}'}, "J"),
        (
            {
                "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}",
                "tokenizer_config.json": '{"bos_token": null, "eos_token": "E"}',
            },
            "|E",
        ),
    ],
)
def test_where_the_template_is_found(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert load_template(tmp_path).render(HELLO) == text


def test_tools_choose_the_template_for_them() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T"})
    assert [template.render(HELLO, extra=extra) for extra in (None, {"tools": None}, {"tools": [{}]}, {})] == [
        "D",
        "D",
        "T",
        "D",
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"^Qwen3: no chat template; add chat_template.jinja, or tokenizer_config.json with a chat_template in it"),
        ({"tokenizer_config.json": "{}"}, "no chat template; add"),
        ({"tokenizer_config.json": '{"chat_template": ""}'}, "no chat template; add"),
        ({"tokenizer_config.json": '{"chat'}, r"^Qwen3/tokenizer_config.json is not JSON .*line 1 column 2"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json is nested more than 64 levels deep"),
        (
            {"tokenizer_config.json": "[1]"},
            "tokenizer_config.json holds a JSON list; an object with named values is needed",
        ),
        ({"tokenizer_config.json": '{"chat_template": 5}'}, "neither a text nor a list"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'}, "neither a text nor a list"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "x", "template": "X"}]}'},
            r"no template called default \(found: x\)",
        ),
        ({"chat_template.jinja": b"ok \xff"}, r"^Qwen3/chat_template.jinja is not UTF-8 at byte 3"),
        ({"chat_template.jinja": b" " * (SOURCE_LIMIT + 1)}, r"has 1,048,577 bytes; at most 1,048,576 are read"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, files: dict[str, str | bytes], message: str) -> None:
    folder = tmp_path / "Qwen3"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message) as caught:
        load_template(folder)
    assert str(tmp_path) not in str(caught.value)


# Faults of a template


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\n{% for x in %}", 2, "does not compile: Expected an expression"),
        ("{% if true %}\n\n", 1, "does not compile: Unexpected end of template"),
        ("{{ 'open }}", 1, "does not compile"),
        ("\n\n{{ 1 | nofilter }}", 3, "does not compile: No filter named 'nofilter'"),
        ("{% unknown %}", 1, "does not compile: Encountered unknown tag 'unknown'"),
        (
            "\n{{ messages[0].missing.more }}",
            2,
            "fails on these messages: UndefinedError: .* has no attribute 'missing'",
        ),
        ("\n\n{{ messages[0].content + 1 }}", 3, "fails on these messages: TypeError"),
        ("{{ range(10 ** 9) }}", 1, "fails on these messages: OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}", 1, "fails on these messages: RecursionError"),
        ("{% include 'other' %}", 1, "fails on these messages: TypeError: no loader"),
    ],
)
def test_a_broken_template_is_named_with_its_line(source: str, line: int, message: str) -> None:
    with pytest.raises(ModelError, match=rf"^Model/chat_template.jinja, line {line}: the chat template {message}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ lipsum.__globals__['os'].popen('id') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '%s' % messages.__class__ }}",
        "{{ namespace.__init__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ dict.__class__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({}) }}",
        "{% if messages.__len__ is defined %}{% endif %}",
    ],
)
def test_reaching_out_of_the_sandbox_is_refused(source: str) -> None:
    with pytest.raises(
        ModelError, match=r"^Model/chat_template.jinja, line 1: the chat template reaches out of its sandbox"
    ):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "{{ " + "(" * 5000 + ")" * 5000 + " }}"]
)
def test_a_template_nested_too_deep_does_not_compile(source: str) -> None:
    template = ChatTemplate({"default": source, "tool_use": "T"}, origin="Model/chat_template.jinja")
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(
                ModelError,
                match=r"^Model/chat_template.jinja: the chat template does not compile: (Syntax|Recursion)Error",
            ):
                template.render(HELLO)
        assert template.render(HELLO, extra={"tools": [{}]}) == "T"


def test_an_endless_error_is_cut() -> None:
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('x' * 10 ** 7) }}")
    assert len(str(caught.value)) < 1100


def test_the_template_cannot_see_files_or_start_processes() -> None:
    for source in ("{{ open('x') }}", "{{ import('os') }}", "{{ os.environ }}", "{{ __import__('os') }}"):
        with pytest.raises(ModelError):
            render(source)


def test_what_the_template_raises_is_told_in_its_own_words() -> None:
    with pytest.raises(
        RequestError, match=r"^the model's chat template refuses these messages: The system message must come first\.$"
    ):
        render("{{ raise_exception('The system message must come first.') }}")


# Limits

THRICE = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{%"
    " endfor %}"
)
NESTED = (
    "{% set n = namespace(a=['x'], b=['x']) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b]"
    " %}{% endfor %}"
)
ENDLESS = {
    "nested ranges": THRICE,
    "one comparison in C": NESTED + "{{ n.a == n.b }}",
    "one text in C": NESTED + "{{ n.a }}",
    "one JSON in C": NESTED + "{{ n.a | tojson }}",
    "a large power": "{{ 7 ** (7 ** 11) }}",
}
GREEDY = {
    "a string multiplied": "{{ 'a' * 10 ** 10 }}",
    "a string doubled": (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}"
    ),
    "a list that grows": "{% set n = namespace(l=[0]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "a list multiplied": "{{ ([0] * 10 ** 9) | length }}",
    "digits": "{{ '%0999999999d' % 1 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "join": "{% set s = 'x' * 10 ** 6 %}{% set t = ([s] * 10000) | join %}",
    "replace": "{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 6) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_ended(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"^Model/chat_template.jinja: the chat template was not done after 0\.7 s and was ended"
    ):
        render(ENDLESS[name], SHORT)


@pytest.mark.parametrize("name", GREEDY)
def test_a_template_without_measure_is_stopped(name: str) -> None:
    with pytest.raises(
        ModelError, match=r"^Model/chat_template.jinja, line 1: the chat template takes more than 512 MiB of memory"
    ):
        render(GREEDY[name], RenderLimits(seconds=30))


def test_the_time_limit_is_five_seconds() -> None:
    assert RenderLimits() == RenderLimits(seconds=5.0, text=16 * 2**20)
    with pytest.raises(
        ModelError, match=r"Model/chat_template.jinja: the chat template was not done after 5 s and was ended"
    ):
        render(ENDLESS["nested ranges"])


def test_memory_is_watched_from_outside_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a system whose kernel keeps no address limit: a child without one is ended by the size that its parent
    sees.
    """
    child = tmp_path / "child.py"
    source = jinja_process._CHILD.read_text(encoding="utf-8")
    confine = "    _confine(int(memory))\n"
    assert source.count(confine) == 1
    child.write_text(source.replace(confine, ""), encoding="utf-8")
    monkeypatch.setattr(jinja_process, "_CHILD", child)
    with pytest.raises(ModelError, match=r"takes more than 64 MiB of memory"):
        render(GREEDY["join"], RenderLimits(memory=64 * 2**20))


@pytest.mark.parametrize(
    "loop", ["{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "{{ 'é' * (8 * 2 ** 20 + 1) }}"]
)
def test_a_text_that_is_too_long_is_refused(loop: str) -> None:
    with pytest.raises(
        ModelError, match=r"writes more than 16,777,216 bytes; shorten the messages or repair the template"
    ):
        render(loop)


def test_a_text_at_the_limit_is_rendered() -> None:
    text = "é" * (8 * 2**20)
    assert render("{{ messages[0].content }}", messages=[Message("user", text)]) == text


def test_messages_far_beyond_the_limit_are_refused_before_they_are_sent() -> None:
    with pytest.raises(
        RequestError,
        match=r"the conversation has 67,1\d\d,\d\d\d bytes; a prompt has at most 16,777,216: shorten the messages",
    ):
        render("{{ messages[0].content }}", messages=[Message("user", "a" * (64 * 2**20))])


def test_after_each_limit_the_template_renders_again() -> None:
    source = (
        "{% if messages[0].content == 'loop' %}"
        + ENDLESS["nested ranges"]
        + "{% endif %}{{ messages[0].content * messages[0].n }}"
    )
    template = ChatTemplate({"default": source}, limits=SHORT)
    assert template.render([{"role": "user", "content": "a", "n": 2}]) == "aa"
    for bad in (
        {"content": "loop", "n": 1},
        {"content": "a", "n": 10**10},
        {"content": "a", "n": 10**8},
        {"content": "a", "n": None},
    ):
        with pytest.raises(ModelError):
            template.render([{"role": "user", **bad}])
        assert template.render([{"role": "user", "content": "b", "n": 3}]) == "bbb"


# The process


def child_of(template: ChatTemplate) -> psutil.Process:
    pid = template._process.pid
    assert pid is not None
    return psutil.Process(pid)


def gone(process: psutil.Process, within: float) -> bool:
    try:
        process.wait(within)
    except psutil.TimeoutExpired:
        return False
    return True


def test_one_process_serves_every_render_and_is_given_back() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": "T{{ tools | length }}"})
    assert template._process.pid is None
    template.render(HELLO)
    child = child_of(template)
    threads = threading.active_count()
    for n in range(30):
        assert template.render([Message("user", str(n))], extra={"tools": [{}] * n} if n % 3 else None) == (
            f"T{n}" if n % 3 else str(n)
        )
    assert child_of(template) == child
    assert threading.active_count() == threads
    template.close()
    assert gone(child, 5)
    template.close()
    assert template.render(HELLO) == "Hello"
    child = child_of(template)
    del template
    assert gone(child, 5)


def test_nothing_is_left_behind_after_a_limit() -> None:
    before = {child.pid for child in psutil.Process().children()}
    threads = threading.active_count()
    for name in ("nested ranges", "one comparison in C"):
        with pytest.raises(ModelError):
            render(ENDLESS[name], SHORT)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert threading.active_count() == threads


def test_threads_share_it() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content * 1000 }}"})
    wrong: list[str] = []

    def work(letter: str) -> None:
        wrong.extend(letter for _ in range(25) if template.render([Message("user", letter)]) != letter * 1000)

    workers = [threading.Thread(target=work, args=(letter,)) for letter in "abcd"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_process_that_somebody_ended_is_started_again() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"})
    template.render(HELLO)
    child = child_of(template)
    child.kill()
    assert gone(child, 5)
    assert template.render(HELLO) == "Hello"


def test_without_its_parent_the_child_ends_even_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
from onedesk.service.core import Message
from onedesk.service.text.jinja_process import RenderLimits
from onedesk.service.text.template import ChatTemplate

source = "{{% if messages[0].content == 'loop' %}}{THRICE}{{% endif %}}"
template = ChatTemplate({{"default": source}}, limits=RenderLimits(seconds=2))
template.render([Message("user", "once")])
print(template._process.pid, flush=True)
template.render([Message("user", "loop")])
""",
        encoding="utf-8",
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)  # into the loop
    finally:
        parent.kill()
        parent.wait()
    assert gone(child, 20)


def test_the_child_sees_no_environment_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken over')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert render("{{ messages[0].content }}") == "Hello"


def test_a_python_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"cannot be started: No such file"):
        render("x")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ModelError, match=r"does not say where Python is"):
        render("x")
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    stub.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stub))
    with pytest.raises(ModelError, match=r"did not come up \(ended, status 3\)"):
        render("x")


def test_an_unsafe_jinja_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "version", lambda name: "3.1.5")
    with pytest.raises(ModelError, match=r"jinja2 3\.1\.5 has known ways out of its sandbox; install 3\.1\.6 or newer"):
        ChatTemplate({"default": "x"})


# What is given to it


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestError, match="the conversation is empty"):
        ChatTemplate({"default": "x"}).render([])


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {(1, 2): 3}])
def test_values_that_json_cannot_say_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        ChatTemplate({"default": "x"}).render(HELLO, extra={"value": value})


def test_the_fixed_variables_cannot_be_replaced() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }} {{ add_generation_prompt }} {{ enable_thinking }}"})
    extra = {"messages": [], "add_generation_prompt": 5, "enable_thinking": False}
    assert template.render(HELLO, thinking="on", extra=extra) == "Hello True False"


@pytest.mark.parametrize(
    "text", ["👨‍👩‍👧‍👦", "\x00\x1f\x7f", "\ud83d", "\u2028\u2029", "{{ 1 }}{% if %}", "\r\n\t", "</script>&"]
)
def test_text_goes_through_untouched(text: str) -> None:
    assert render("{{ messages[0].content }}", messages=[Message("user", text)]) == text
