"""The installer's steps, run in order: each has a log, a stamp once it is done, and a clear error when it fails."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import OnedeskError
from ..python_process import SAFE_FOLDER, probe_command, python_environment
from .pip_settings import pip_environment
from .telling import EVERY, LOOK, Teller
from .tree import Tree, write_if_changed

LOG = logging.getLogger(__name__)
TAIL_LINES = 15
LOCK = ".onedesk.lock"
# Git variables that say how to reach a repository; others (GIT_DIR, GIT_WORK_TREE ...) would redirect a clone.
_GIT_PASSED = (
    "GIT_SSL_",
    "GIT_PROXY_",
    "GIT_HTTP_",
    "GIT_SSH",
    "GIT_ASKPASS",
    "GIT_CONFIG_GLOBAL",
    "GIT_CONFIG_SYSTEM",
)


class SetupError(OnedeskError):
    """The installer cannot continue: what failed, the end of its log, what to do."""


def tail(log: Path) -> str:
    """The last non-empty lines of a log."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:])


@dataclass(frozen=True, slots=True)
class Steps:
    """Runs the steps of one installation in `tree`; reports the progress of a long step at intervals."""

    tree: Tree
    every: float = EVERY

    @property
    def stamps(self) -> Path:
        return self.tree.envs / "steps"

    def done(self, step: str, key: str) -> bool:
        """Whether `step` was finished for `key`, the versions that it depends on."""
        stamp = self.stamps / step
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == key

    def mark(self, step: str, key: str) -> None:
        """Record that `step` is finished for `key`."""
        self.stamps.mkdir(parents=True, exist_ok=True)
        write_if_changed(self.stamps / step, key)

    def environment(self) -> dict[str, str]:
        """The environment variables for every command of the installer: nothing is cached or installed outside the
        tree.
        """
        kept = {
            name: value
            for name, value in pip_environment(python_environment()).items()
            if name != "VIRTUAL_ENV" and (not name.startswith("GIT_") or name.startswith(_GIT_PASSED))
        }
        ours = {
            "TMPDIR": str(self.tree.cache / "tmp"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
        # pip asks rustc for its version; a rustup that was never used would then create its folder in the home
        # directory.
        if not (Path.home() / ".rustup").exists():
            ours["RUSTUP_HOME"] = str(self.tree.cache / "rustup")
        return kept | self.tree.environment() | ours

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Announce a step, and report how long it took."""
        LOG.info("%-9s %s ...", name, what)
        begin = time.monotonic()
        yield
        LOG.info("%-9s done in %.0f s", name, time.monotonic() - begin)

    def run(
        self,
        step: str,
        argv: Sequence[str | Path],
        advice: str,
        *,
        timeout: float | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Run a command with its output in the step's log. Raises SetupError with the end of the log and `advice`."""
        log = self.tree.logs / f"{step}.log"
        words = [str(word) for word in argv]
        with log.open("ab") as out:
            out.write(f"$ {' '.join(words)}\n".encode())
            out.flush()
            try:
                code = self._wait(step, words, out, timeout, self.environment() | dict(more or {}))
                ending = f"it ended with status {code}"
            except subprocess.TimeoutExpired:
                code, ending = -1, f"it did not end within {timeout:g} s"
            except OSError as error:
                code, ending = -1, f"it could not be started: {error.strerror}"
        if code != 0:
            raise SetupError(
                f"step {step} failed: {Path(words[0]).name}: {ending}\n{tail(log)}\n  log: {log}\n  what to do:"
                f" {advice}"
            )

    def _wait(
        self, step: str, words: list[str], out: IO[bytes], timeout: float | None, environment: Mapping[str, str]
    ) -> int:
        """Run a command to its end and report its progress; returns its status. On any error here the command is ended
        too.
        """
        log, temporary, folder = self.tree.logs / f"{step}.log", self.tree.cache / "tmp", Path(words[0]).parent.parent
        teller = Teller(step, log, temporary, folder, self.every)
        end = None if timeout is None else time.monotonic() + timeout
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd=temporary
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(LOOK, self.every))
                if end is not None and time.monotonic() > end:
                    raise subprocess.TimeoutExpired(words, timeout or 0)
                teller.tell()
        finally:
            teller.end()
            if process.poll() is None:
                process.kill()
                process.wait()

    def ask(self, python: Path, code: str) -> str | None:
        """The output of a line of Python in the environment of `python`; None if it fails."""
        answer = subprocess.run(
            probe_command(python, code),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment(),
            cwd=SAFE_FOLDER,
            check=False,
        )
        return answer.stdout.strip() if answer.returncode == 0 else None


@contextmanager
def locked(tree: Tree) -> Iterator[None]:
    """Lock the installation for one installer; SetupError if another one holds the lock. It ends with the process in
    every case.
    """
    with (tree.prefix / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SetupError(
                f"another install.sh is working in {tree.prefix}; wait for its end, then run this again"
            ) from error
        yield
