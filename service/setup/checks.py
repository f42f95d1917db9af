"""The checks of ./install.sh --test after installing: style, types, shell, tests. All of them run, even after a
failure.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..python_process import isolated_command
from .environment import TEST_PINS, Environment
from .steps import Steps

LOG = logging.getLogger(__name__)
SCRIPTS = ("install.sh", ".ci/run")
# Triton's interpreter runs the CUDA kernels on a CPU. It is not in the list of pins: a CUDA build of torch brings its
# own version.
TRITON = "triton==3.6.0"


def commands(environment: Environment, report: Path, more: Sequence[str]) -> dict[str, list[str]]:
    """The checks by name, pytest last so that its summary ends the output; `more`: further arguments for pytest, which
    writes `report` when its last test has ended."""
    python = str(environment.python)
    checks = {
        "ruff check": isolated_command("-m", "ruff", "check", ".", python=python),
        "ruff format": isolated_command("-m", "ruff", "format", "--check", ".", python=python),
        "pyright": isolated_command("-m", "pyright", "--pythonpath", python, python=python),
    }
    shellcheck = environment.folder / "bin" / "shellcheck"
    if shellcheck.exists():
        checks["shellcheck"] = [str(shellcheck), *SCRIPTS]
    else:
        LOG.info("checks    shellcheck has no package for this processor: the shell scripts are not checked")
    # The pytest cache would be written into the checkout.
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    checks["pytest"] = isolated_command(*words, *more, python=python)
    return checks


def run_checks(environment: Environment, steps: Steps, checkout: Path, more: Sequence[str] = ()) -> list[str]:
    """Install what the checks need, run them in the checkout, return the names of those that failed."""
    environment.add_pins("tests", TEST_PINS)
    environment.add_missing("triton", TRITON)
    caches = {"RUFF_CACHE_DIR": "ruff", "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis"}
    # Not in the tree's cache: links from model folders may point into it, and tests need links that may not.
    temporary = steps.tree.envs / "tmp"
    temporary.mkdir(exist_ok=True)
    variables = (
        steps.environment()
        | {name: str(steps.tree.cache / folder) for name, folder in caches.items()}
        | {"TMPDIR": str(temporary)}
    )
    failed = []
    report = temporary / "tests.xml"
    report.unlink(missing_ok=True)
    for name, argv in commands(environment, report, more).items():
        LOG.info("checks    %s", name)
        sys.stdout.flush()
        if subprocess.run(argv, cwd=checkout, env=variables, stdin=subprocess.DEVNULL, check=False).returncode != 0:
            failed.append(name)
    if not report.exists():  # a test that ends the process with status 0 must not pass for all that follow
        LOG.error("checks    pytest has not come to its end")
        failed.append("the end of pytest")
    return failed
