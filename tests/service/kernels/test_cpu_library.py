"""The compiled kernels are built once and completely. If they cannot be built, plain torch runs and says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from onedesk.service.errors import Cancelled
from onedesk.service.kernels.choose import choose_kernels
from onedesk.service.kernels.cpu import compile as compiling
from onedesk.service.kernels.cpu.compile import compile_library
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.reference import ReferenceKernels

TINY = """
#include <math.h>
long attention_width(void) { return 8; }
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and one small source instead of the kernels: these tests are about the build."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.c").write_text(TINY)
    monkeypatch.setattr(compiling, "FOLDER", sources)
    return tmp_path / "cache"


def built_in(cache: Path) -> Path:
    (built,) = cache.iterdir()
    return built


def test_the_library_is_compiled_once(small: Path) -> None:
    library, why_not = compile_library(small)
    assert library is not None, why_not
    assert library.attention_width() == 8
    made = built_in(small).stat().st_mtime_ns
    assert compile_library(small)[0] is not None
    assert built_in(small).stat().st_mtime_ns == made


def test_a_changed_source_is_compiled_anew(small: Path) -> None:
    assert compile_library(small)[0] is not None
    (compiling.FOLDER / "tiny.h").write_text("/* changed */")
    assert compile_library(small)[0] is not None
    assert len(list(small.iterdir())) == 2


def test_unused_old_library_is_removed(small: Path) -> None:
    assert compile_library(small)[0] is not None
    first = built_in(small)
    loaded, lately, kept = small / "kernels-loaded.so", small / "kernels-lately.so", small / "service.token"
    for other in (loaded, lately, kept):
        other.touch()
    long_ago, now = time.time() - compiling.UNUSED_SECONDS - 60, time.time()
    os.utime(loaded, (now, long_ago))
    for other in (first, kept):
        os.utime(other, (long_ago, long_ago))
    (compiling.FOLDER / "tiny.h").write_text("/* changed */")
    assert compile_library(small)[0] is not None
    left = set(small.iterdir())
    assert first not in left
    assert left > {loaded, lately, kept}
    assert len(left) == 4


@pytest.mark.parametrize("cache", ["cache", "absent/cache"])
def test_a_full_disk_is_told_before_anything_is_compiled(
    small: Path, cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling.shutil, "disk_usage", lambda _: SimpleNamespace(free=300 << 10))
    monkeypatch.setattr(compiling, "_build", lambda *_: pytest.fail("it compiles"))
    kernels = choose_kernels(torch.device("cpu"), torch.float32, small.parent / cache)
    assert type(kernels) is ReferenceKernels
    assert caplog.messages == [
        "the CPU runs plain torch, slower, without compiled kernels: building them takes 1 MiB in the cache folder, "
        "but its disk has 300 KiB; free 724 KiB there"
    ]


def test_stop_ends_the_compiler_and_its_children(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, begun = tmp_path / "cc", tmp_path / "begun"
    slow.write_text(f"#!/bin/sh\nsleep 600 &\necho $$ $! > {begun}.new && mv {begun}.new {begun}\nwait\n")
    slow.chmod(0o755)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: str(slow))
    with pytest.raises(Cancelled, match="compiled"):
        compile_library(small, begun.exists)
    assert list(small.iterdir()) == []
    for pid in begun.read_text().split():
        state = Path("/proc", pid, "stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("damage", ["cut short", "emptied", "overwritten", "one bit"])
def test_a_damaged_library_is_built_anew(small: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    assert compile_library(small)[0] is not None
    built = built_in(small)
    content = built.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut short": content[:middle],
        "emptied": b"",
        "overwritten": b"not a library",
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }[damage]
    replacement = small / "damaged"  # a new file: the old one is mapped by this process
    replacement.write_bytes(damaged)
    replacement.replace(built)
    library, why_not = compile_library(small)
    assert library is not None, why_not
    assert "damaged" in caplog.text
    assert built.read_bytes() == content


def test_damaged_library_is_not_loaded(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiling.shutil.which("cc")
    assert compile_library(small)[0] is not None
    built = built_in(small)
    built.unlink()  # a new file: the old one is mapped by this process, which would die of a bus error at its exit
    built.write_bytes(b"\x7fELF and no more")
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    library, why_not = compile_library(small)
    assert compiler is not None
    assert library is None
    assert "no C compiler" in why_not


def test_built_library_is_used_without_compiler(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_library(small)[0] is not None
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    library, why_not = compile_library(small)
    assert library is not None, why_not


def test_that_it_compiles_is_told_once(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert compile_library(small)[0] is not None
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the CPU kernels for this processor, once; a load waits some seconds for that"
    ]


def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from onedesk.service.kernels.cpu import compile; "
    script += "compile.FOLDER = Path(sys.argv[1]); library, why = compile.compile_library(Path(sys.argv[2])); "
    script += "print(why or library.attention_width())"
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "tiny.c").write_text(TINY)
    command = [sys.executable, "-c", script, str(tmp_path / "sources"), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["8", "8"]
    assert built_in(tmp_path / "cache").suffix == ".so"


def test_without_compiler_runs_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(torch.device("cpu"), torch.float32, tmp_path)
    assert type(kernels) is ReferenceKernels
    assert "no C compiler" in kernels.reason
    assert "no C compiler" in caplog.text


def test_with_a_compiler_the_instructions_are_named(
    library: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("onedesk.service.kernels.choose.compile_library", lambda *_: (library, ""))
    kernels = choose_kernels(torch.device("cpu"), torch.bfloat16, tmp_path)
    assert isinstance(kernels, CpuKernels)
    assert kernels.reason.startswith("compiled for ")
    assert kernels.reason.endswith("threads")


@pytest.mark.parametrize("quoted", [b"/tmp", b"/M\xfcll", "/内存".encode()], ids=["ASCII", "Latin-1", "UTF-8"])
def test_compiler_error_is_quoted_in_any_encoding(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quoted: bytes
) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"#!/bin/sh\necho 'cc: " + quoted + b": no space left for objects' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: str(broken))
    library, why_not = compile_library(small)
    assert library is None
    assert "no space left for objects" in why_not
    assert list(small.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no program", "the C compiler cannot be run: Exec format error"),
        ("#!/bin/sh\nkill -9 $$\n", "it ended with status -9"),
    ],
)
def test_a_compiler_that_does_not_run_is_told(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, why: str
) -> None:
    broken = tmp_path / "cc"
    broken.write_text(content)
    broken.chmod(0o755)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: str(broken))
    library, why_not = compile_library(small)
    assert library is None
    assert why in why_not
    assert str(tmp_path) not in why_not


def test_a_source_that_is_refused_is_told_without_paths(small: Path, tmp_path: Path) -> None:
    (compiling.FOLDER / "wrong.c").write_text("this is no C\n")
    library, why_not = compile_library(small)
    assert library is None
    assert "refused the kernels" in why_not
    assert str(tmp_path) not in why_not


def test_unwritable_cache_message_has_no_path(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file, no folder")
    library, why_not = compile_library(tmp_path / "cache")
    assert library is None
    assert "File exists in the cache folder" in why_not
    assert str(tmp_path) not in why_not
