"""A child process that holds one engine and measures on request: one JSON object per line in, one per line out."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from .. import errors
from ..errors import OnedeskError, PeerError
from ..memory.file_cache import cached_bytes
from ..python_process import package_command
from .peak_watch import PeakWatch, status_bytes
from .subject import Subject, SubjectSpec

Engine = Literal["onedesk", "transformers", "llama.cpp"]
_PR_SET_PDEATHSIG = 1  # Linux: the signal that the kernel sends when the parent dies


class MeasuringChild:
    """The parent's side of a measuring child. A context manager; leaving it ends the child, by its process id."""

    def __init__(self, engine: Engine, task: SubjectSpec) -> None:
        self.engine: Engine = engine
        setup = asdict(task) | {"engine": engine, "model": str(task.model), "cache": str(task.cache)}
        command = package_command("onedesk.service.bench.measuring_child", json.dumps(setup))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed on leaving; a full pipe would stop the child
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True
        )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Have the child do `what`; its own OnedeskError is raised here, PeerError when it ended without an answer."""
        if self._child.stdin is None or self._child.stdout is None:
            raise PeerError(f"the measuring process of {self.engine} was started without pipes")
        try:
            self._child.stdin.write(json.dumps({"do": what} | arguments) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(
                f"the measuring process of {self.engine} ended, status {self._child.wait()}: {self._last_words()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise _error_class(answer["error"]["type"])(answer["error"]["message"])
        return answer

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def _last_words(self) -> str:
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "no output"

    def __enter__(self) -> MeasuringChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.communicate()
        self._stderr.close()


def _error_class(name: str) -> type[OnedeskError]:
    found = getattr(errors, name, PeerError)
    return found if isinstance(found, type) and issubclass(found, OnedeskError) else PeerError


# What follows runs in the child.


class _Requests:
    """The requests that a parent may make of a subject."""

    def __init__(self, subject: Subject, files: list[Path]) -> None:
        self._subject = subject
        self._files = files

    def load(self, files: Sequence[str] = ()) -> dict[str, Any]:
        """`files`: the files that are read, if they are not the model's own."""
        with PeakWatch(list(map(Path, files)) or self._files) as watch:
            started = time.perf_counter()
            self._subject.load()
            seconds = time.perf_counter() - started
        return {"seconds": seconds, "peak_bytes": self._peak(watch.peak)}

    def unload(self) -> dict[str, Any]:
        self._subject.unload()
        return {}

    def first_token(self, ids: list[int], overlap: bool) -> dict[str, Any]:
        return asdict(self._subject.first_token(ids, overlap=overlap)) | {"peak_bytes": self._peak()}

    def wake(self, ids: list[int], files: Sequence[str]) -> dict[str, Any]:
        """`files`: the files that are read; `read_bytes` of them came from the disk."""
        before = _disk_bytes()
        sample = asdict(self._subject.wake(ids))
        after = _disk_bytes()
        cached = sum(cached_bytes(Path(file)) for file in files)
        read = None if before is None or after is None else after - before
        return sample | {"read_bytes": read, "cached_bytes": cached, "peak_bytes": self._peak()}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        return {"seconds": self._subject.prefill(ids), "peak_bytes": self._peak()}

    def decode(self, prompts: list[list[int]], tokens: int, sampling: str) -> dict[str, Any]:
        return asdict(self._subject.decode(prompts, tokens, sampling)) | {"peak_bytes": self._peak()}

    def prefix(self, ids: list[int], tails: list[list[int]]) -> dict[str, Any]:
        return asdict(self._subject.prefix(ids, tails)) | {"peak_bytes": self._peak()}

    def _peak(self, grown: int | None = None) -> int:
        """Device memory if the device has its own; otherwise `grown`, or the peak of the whole process."""
        on_device = self._subject.device_peak()
        if on_device is not None:
            return on_device
        return status_bytes("VmHWM") if grown is None else grown


def _make_subject(setup: Mapping[str, Any]) -> Subject:
    values: dict[str, Any] = {key: value for key, value in setup.items() if key != "engine"}
    values |= {
        "model": Path(values["model"]),
        "cache": Path(values["cache"]),
        "end_tokens": tuple(values["end_tokens"]),
    }
    task = SubjectSpec(**values)
    if setup["engine"] == "transformers":
        from .transformers_subject import Transformers

        return Transformers(task)
    if setup["engine"] == "llama.cpp":
        from .llama_cpp_subject import LlamaCpp

        return LlamaCpp(task)
    from .onedesk_subject import OnedeskSubject

    return OnedeskSubject(task)


def _disk_bytes() -> int | None:
    """Bytes that this process has had the disk read so far; None where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _checkpoint_files(model: Path) -> list[Path]:
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    return [path for path in files if path.is_file()]


def _serve(setup: Mapping[str, Any]) -> None:
    """Answer each line until standard input ends. What libraries print goes to stderr, never between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests: _Requests | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.pop("do")
        try:
            requests = requests or _Requests(_make_subject(setup), _checkpoint_files(Path(setup["model"])))
            actions: dict[str, Callable[..., dict[str, Any]]] = {
                "load": requests.load,
                "unload": requests.unload,
                "prefill": requests.prefill,
                "decode": requests.decode,
                "first_token": requests.first_token,
                "wake": requests.wake,
                "prefix": requests.prefix,
            }
            answer = actions[what](**asked)
        except (OnedeskError, OSError, RuntimeError, ValueError) as error:
            answer = {"error": {"type": type(error).__name__, "message": str(error)}}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it and ends this child
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _serve(json.loads(sys.argv[1]))
