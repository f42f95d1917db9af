"""A child process of another engine, as a process: it starts, tells why it does not, and leaves nothing behind
however anybody ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from onedesk.service.errors import PeerError
from onedesk.service.peers.child import Child, Order
from serving import alive

PYTHON = (sys.executable, "-I", "-S", "-c")


def order(folder: Path, code: str, *, grace: float = 5.0, secret: str | None = None) -> Order:
    return Order("the engine x", (*PYTHON, code), dict(os.environ), folder / "logs" / "peer-x.log", secret, grace)


def wait_for(found: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)


def log_of(folder: Path) -> str:
    return (folder / "logs" / "peer-x.log").read_text()


def test_it_runs_in_a_group_of_its_own_and_ends_when_it_is_asked(tmp_path):
    child = Child(order(tmp_path, "import os, time; print(os.getpgid(0), flush=True); time.sleep(600)"))
    wait_for(lambda: bool(log_of(tmp_path)))
    assert int(log_of(tmp_path)) == child.pid != os.getpgid(0)
    assert child.running
    assert child.own_bytes() > 1 << 20
    child.stop()
    assert not alive(child.pid)
    assert child.own_bytes() == 0
    assert "ended with signal SIGTERM" in child.ending()
    child.stop()  # a second time is no error


def test_one_that_does_not_listen_to_sigterm_is_killed(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    child = Child(order(tmp_path, code, grace=0.2))
    wait_for(lambda: "deaf" in log_of(tmp_path))
    child.stop()
    assert not alive(child.pid)
    assert "ended with signal SIGKILL" in child.ending()


def test_its_own_children_end_with_it(tmp_path):
    code = (
        "import subprocess, sys, time\ndeaf = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " print(1, flush=True); time.sleep(600)'\nchild = subprocess.Popen([sys.executable, '-I', '-S', '-c', deaf],"
        " stdout=subprocess.PIPE)\nchild.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    child = Child(order(tmp_path, code))
    wait_for(lambda: log_of(tmp_path).endswith("\n"))
    grandchild = int(log_of(tmp_path))
    child.stop()
    wait_for(lambda: not alive(grandchild))
    assert not alive(child.pid)


def test_a_crash_reports_its_log_without_the_secret(tmp_path):
    code = (
        "import sys; print('\\n'.join(f'line {i}' for i in range(99)), flush=True); sys.exit('key is s3cr3t-key: no"
        " model')"
    )
    child = Child(order(tmp_path, code, secret="s3cr3t-key"))
    wait_for(lambda: not child.running)
    words = child.ending()
    assert words.startswith("the engine x ended with status 1; the end of peer-x.log:")
    assert "line 98" in words
    assert "line 9\n" not in words
    assert words.endswith("key is ***: no model")
    assert (tmp_path / "logs" / "peer-x.log").stat().st_mode & 0o777 == 0o600
    child.stop()


def test_a_silent_death_and_a_killed_one_have_words_too(tmp_path):
    child = Child(order(tmp_path, "import os; os.kill(os.getpid(), 11)"))
    wait_for(lambda: not child.running)
    assert child.ending() == "the engine x ended with signal SIGSEGV; it wrote nothing to peer-x.log"
    Child(order(tmp_path, "pass")).stop()
    assert (tmp_path / "logs" / "peer-x.log.old").exists()


def test_a_program_that_is_missing_or_no_program(tmp_path):
    with pytest.raises(PeerError, match=r"there is no program 'no-such-engine'; install it, or name it with command"):
        Child(Order("the engine x", ("no-such-engine",), dict(os.environ), tmp_path / "x.log"))
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(PeerError, match="cannot be run: No such file or directory"):
        Child(Order("the engine x", (str(broken),), dict(os.environ), tmp_path / "x.log"))


PARENT = """
import os, sys, time
from pathlib import Path
from onedesk.service.peers.child import Child, Order
argv = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
child = Child(Order("x", argv, dict(os.environ), Path(sys.argv[1]), None, 0.5))
held = os.fork() if "fork" in sys.argv else 0
if held == 0 and "fork" in sys.argv:
    time.sleep(20)
    os._exit(0)
print(child.pid, child._guardian.pid, held, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("more", [[], ["fork"]], ids=["alone", "a fork of us holds the pipe"])
def test_no_orphan_where_we_are_killed(tmp_path, more):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "x.log"), *more], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child, guardian, fork = map(int, parent.stdout.readline().split())
    assert alive(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(child))
    wait_for(lambda: not alive(guardian))
    parent.stdout.close()
    if fork:
        os.kill(fork, signal.SIGKILL)


def test_no_orphan_where_the_guardian_is_killed(tmp_path):
    child = Child(order(tmp_path, "import time; time.sleep(600)"))
    os.kill(child._guardian.pid, signal.SIGKILL)
    wait_for(lambda: not alive(child.pid))
    assert "ended with signal SIGKILL" in child.ending()
    child.stop()
