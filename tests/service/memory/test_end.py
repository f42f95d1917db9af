"""SIGTERM during load, prefill and release: the process ends within 2 s, and nothing stale is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from onedesk.service.work_folder import work_folder
from tiny_qwen3 import write_tiny_qwen3

SECONDS = 2.0
# Renders a template first, so that there is a child process too, then does the task slowly enough to be interrupted in
# it.
DRIVER = """
import sys, time
from pathlib import Path
from onedesk.service.api import open_model
from onedesk.service.core import Message, Request, Sampling
from onedesk.service.memory.backends.mapped import MappedSlab
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

stage, tiny, large, cache = sys.argv[1], *map(Path, sys.argv[2:])
pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
writer = open_model(tiny, pool=pool, context=256, device="cpu", kernel_cache=cache)
request = Request(messages=(Message("user", "a cat"),), sampling=Sampling(seed=5), max_tokens=8)
text = [event.result for event in writer.generate(request) if event.result][-1].text
print("text", text.encode().hex(), flush=True)
model = open_model(large, pool=pool, context=1024, device="cpu", load=False, kernel_cache=cache)
if stage == "load":
    model.load(progress=lambda progress: print("load", flush=True))
if stage == "prefill":
    for event in model.generate(Request(ids=tuple(range(1000)), max_tokens=1)):
        print("prefill" if event.progress and not event.progress.done else "done", flush=True)
if stage == "release":
    right = MappedSlab.give_back

    def slow(slab, offset, nbytes):
        print("release", flush=True)
        time.sleep(0.2)
        return right(slab, offset, nbytes)

    model.load()
    MappedSlab.give_back = slow
    model.give_way()
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny")


def start(stage: str, tiny: Path, large: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, stage, str(tiny), str(large), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def text_of(tiny: Path, large: Path, cache: Path) -> str:
    """The text that a new start generates."""
    with start("none", tiny, large, cache) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return said.splitlines()[0]


def runs(process: psutil.Process) -> bool:
    """Whether it still runs. A process that has ended but was not waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_interrupt_in_any_stage_leaves_nothing(tiny, large, kernel_cache):
    """Each start follows an interrupted one, and generates the same text first."""
    wanted = text_of(tiny, large, kernel_cache)
    cached, shared = contents(kernel_cache), contents(Path("/dev/shm"))
    for stage in ("load", "prefill", "release"):
        with start(stage, tiny, large, kernel_cache) as process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == wanted
            assert process.stdout.readline().strip() == stage
            family = psutil.Process(process.pid).children(recursive=True)
            asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=SECONDS)
            while any(map(runs, family)) and time.monotonic() < asked + SECONDS:
                time.sleep(0.01)
            alive = list(filter(runs, family))
            assert "done" not in process.stdout.read()
        assert process.returncode == -signal.SIGTERM, stage
        assert family, "the template's process was to be met too"
        assert alive == [], stage
        assert (contents(kernel_cache), contents(Path("/dev/shm"))) == (cached, shared), stage
    assert text_of(tiny, large, kernel_cache) == wanted


def test_interrupted_compilation_is_cleaned_up(tmp_path):
    """One source that compiles quickly; the first time the compiler does not end."""
    cache, sources, slow = (tmp_path / name for name in ("cache", "sources", "bin"))
    for folder in (sources, slow):
        folder.mkdir()
    (sources / "tiny.c").write_text("long attention_width(void) { return 8; }\n")
    (slow / "cc").write_text(f"#!/bin/sh\necho $$ >{slow}/new && mv {slow}/new {slow}/pid\nexec sleep 600\n")
    (slow / "cc").chmod(0o755)
    script = "import sys; from pathlib import Path; from onedesk.service.kernels.cpu import compile; "
    script += "compile.FOLDER = Path(sys.argv[1]); compile.compile_library(Path(sys.argv[2])); print('done')"
    command = [sys.executable, "-c", script, str(sources), str(cache)]
    path = {**os.environ, "PATH": f"{slow}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0, env=path) as process:
        while not (slow / "pid").exists():
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(ProcessLookupError):  # ended with the group, unless it has one of its own
            os.kill(int((slow / "pid").read_text()), signal.SIGKILL)
        assert process.communicate(timeout=60)[0] == ""
    assert len(list(cache.glob(f".kernels-{process.pid}-*"))) == 1
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_folder_of_live_process_is_kept(tmp_path):
    with work_folder(tmp_path, "name") as mine, work_folder(tmp_path, "name") as other:
        assert mine.is_dir()
        assert other.is_dir()
        assert mine != other
    assert list(tmp_path.iterdir()) == []
