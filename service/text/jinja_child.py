"""The program that renders chat templates in its own process. It is run by path, never imported, and imports nothing of
Onedesk.

Its arguments are the bytes of memory it may use and the folders of jinja2 and markupsafe. It uses frames on stdin and
stdout: 4 bytes of length, big-endian, then JSON in ASCII. It first sends {"ready": true}. A request is {"source":
template, or null for the last one, "values": {...}, "seconds": S, "limit": BYTES}; the answer is {"text": ...} or
{"error": kind, "message": ..., "line": number or null}. The end of stdin ends the program.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO

MESSAGE_LIMIT = 1000  # characters of an error that are passed on
# Errors of rendering besides jinja's own. Any other ends this process, and the parent reports that.
FAULTS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError),
)

try:
    import resource
except ImportError:  # Windows: only the parent watches
    resource = None


def _confine(memory: int) -> None:
    """Allow `memory` more bytes of address space, and forbid what no template needs: writing files, processes, core
    dumps."""
    if resource is None:
        return
    bounds = {"RLIMIT_AS": _mapped() + memory, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    for name, bound in bounds.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        wanted = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        try:
            resource.setrlimit(kind, (wanted, wanted))
        except (ValueError, OSError):  # macOS refuses some limits: only the parent watches
            continue


def _mapped() -> int:
    """Bytes of address space in use, libraries included; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib would be one more import at every start
            return int(file.read().split()[0]) * (resource.getpagesize() if resource else 0)
    except OSError:
        return 0


def _alarm(seconds: float) -> None:
    """Let the kernel end this process after `seconds`, even inside a long C call and without a parent; 0 cancels it."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


class TemplateRaisedError(Exception):
    """The template called raise_exception."""


class TextTooLongError(Exception):
    """The text passed the limit."""


def _environment() -> Any:
    """transformers' dialect of jinja: its options, tags, filter and functions."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, is_internal_attribute

    class Generation(Extension):
        """`{% generation %}` marks the model's text, for training; here its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block of its own scope, as transformers has it: a variable set inside is not seen after it
            return nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        def __init__(self, *args: Any, **values: Any) -> None:
            super().__init__(*args, **values)
            for name in dict(*args, **values):
                _refuse_private(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"access to attribute {name!r} of a namespace is unsafe")

    class Dict:
        """dict() without access to the class."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            """Access to Python's internals fails at once; jinja's own sandbox would print nothing and continue."""
            if attribute.startswith("_") or is_internal_attribute(obj, attribute):
                raise jinja2.exceptions.SecurityError(
                    f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
                )
            return super().unsafe_undefined(obj, attribute)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=Dict(), namespace=Namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateRaisedError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _line(error: BaseException) -> int | None:
    """The template's line that raised `error`; jinja puts it into the traceback."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _fault(kind: str, message: str, line: int | None) -> dict[str, Any]:
    return {"error": kind, "message": message[:MESSAGE_LIMIT], "line": line}


class Renderer:
    """Compiles and renders the latest template."""

    def __init__(self) -> None:
        import jinja2

        self._errors = jinja2.exceptions
        self._environment = _environment()
        self._template: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The text of one request, or its error."""
        try:
            if request["source"] is not None:
                self._template = None
                self._template = self._environment.from_string(request["source"])
            return {"text": self._render(request["values"], request["limit"])}
        except self._errors.TemplateSyntaxError as error:
            return _fault("syntax", str(error.message), error.lineno)
        except TemplateRaisedError as error:
            return _fault("raised", str(error), _line(error))
        except self._errors.SecurityError as error:
            return _fault("sandbox", str(error), _line(error))
        except TextTooLongError:
            return _fault("long", "", None)
        except MemoryError as error:
            return _fault("memory", "", _line(error))
        except (self._errors.TemplateError, *FAULTS) as error:
            kind = "failed" if self._template else "syntax"  # nested deeper than Python can compile
            return _fault(kind, f"{type(error).__name__}: {error}", _line(error))

    def _render(self, values: dict[str, Any], limit: int) -> str:
        parts: list[str] = []
        left = limit
        for part in self._template.generate(values):
            left -= len(part)
            if left < 0:
                raise TextTooLongError
            parts.append(part)
        text = "".join(parts)
        if len(text.encode("utf-8", "surrogatepass")) > limit:
            raise TextTooLongError
        return text


def _read(stream: BinaryIO) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        raise EOFError
    return json.loads(stream.read(int.from_bytes(head, "big")))


def _write(stream: BinaryIO, document: Any) -> None:
    body = json.dumps(document).encode("ascii")
    stream.write(len(body).to_bytes(4, "big"))
    stream.write(body)
    stream.flush()


def main() -> None:
    """Serve until stdin ends."""
    memory, *folders = sys.argv[1:]
    sys.path.extend(folders)  # where the parent found jinja2 and markupsafe
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    renderer = Renderer()
    _confine(int(memory))
    _write(sink, {"ready": True})
    while True:
        try:
            request = _read(source)
        except EOFError:
            return
        _alarm(request["seconds"])
        answer = renderer.answer(request)
        _write(sink, answer)
        _alarm(0)


if __name__ == "__main__":
    main()
