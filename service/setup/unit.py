"""The systemd user unit of `onedesk serve`: written only on request, removed by uninstall. Standard library only."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

from .record import Record
from .steps import SetupError
from .tree import Tree, write_if_changed

LOG = logging.getLogger(__name__)
NAME = "onedesk.service"
# Seconds between SIGTERM and SIGKILL: [service] grace is 10, and a model that is being loaded is released after it.
STOP_SECONDS = 45
_ASK_SECONDS = 30
_HEAD = "# Onedesk: written by install.sh --service for the installation in "

_ID = "# Installation: "

_UNIT = """\
{head}{prefix}
{id}{installation}
# install.sh --uninstall removes it. Settings belong into onedesk.toml there.
[Unit]
Description=Onedesk: local language models over HTTP
Documentation=file:{documentation}

[Service]
Type=exec
ExecStart=/usr/bin/env {command} serve
{environment}
UMask=0077
NoNewPrivileges=yes
KillMode=mixed
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=5

[Install]
WantedBy=default.target
"""


def unit_path() -> Path:
    """The path of this unit among the user's."""
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "systemd" / "user" / NAME


def unit_text(tree: Tree, command: Path, checkout: Path, installation: str) -> str:
    """The unit: the service in the foreground, with the tree's caches, offline, without rights to gain more."""
    variables = [f"Environment={_quoted(f'{name}={value}')}" for name, value in tree.environment().items()]
    return _UNIT.format(
        head=_HEAD,
        prefix=tree.prefix,
        id=_ID,
        installation=installation,
        documentation=_escaped(str(checkout / "docs" / "http.md")).replace(" ", "%%20"),
        command=_quoted(str(command)).replace("$", "$$"),
        environment="\n".join(variables),
        stop=STOP_SECONDS,
    )


def add_unit(tree: Tree, command: Path, checkout: Path, record: Record) -> None:
    """Write the unit, then start it now and at each login; print the commands where systemd cannot be reached.

    Raises SetupError where the name belongs to another program's unit, or to another installation's.
    """
    path = unit_path()
    _check_ours(path, record)
    record.make_folder(path.parent)
    record.note_unit(path)
    new = write_if_changed(path, unit_text(tree, command, checkout, record.id))
    reason = _systemctl("daemon-reload") or _systemctl("enable", "--now", NAME)
    if reason:
        LOG.info("service   %s is written; %s", path, reason)
        LOG.info(
            "          run this where systemd runs: systemctl --user daemon-reload && systemctl --user enable --now %s",
            NAME,
        )
        return
    LOG.info(
        "service   %s %s; it listens as [service] in %s says", NAME, "runs" if new else "runs as before", tree.settings
    )
    LOG.info("          to have it without being logged in: loginctl enable-linger")


def remove_unit(record: Record) -> None:
    """Stop the service and remove its unit if this installation wrote it; any other unit stays."""
    if record.unit is None:
        return
    path = Path(record.unit)
    if not is_unit_of(path, record):
        LOG.info("kept      %s, which this installation did not write", path)
        return
    reason = _systemctl("disable", "--now", NAME)
    path.unlink()
    reason = _systemctl("daemon-reload") or reason
    LOG.info("removed   %s%s", path, f" ({reason})" if reason else "")


def _check_ours(path: Path, record: Record) -> None:
    if not (path.exists() or path.is_symlink()) or is_unit_of(path, record):
        return
    first = _head(path)[0]
    if first.startswith(_HEAD):
        raise SetupError(
            f"{path} is of the installation in {first.removeprefix(_HEAD)}; take --service out, or uninstall that one"
            " first"
        )
    raise SetupError(f"{path} is there already and is not ours; move it away, then run install.sh again")


def is_unit_of(path: Path, record: Record) -> bool:
    """Whether this installation wrote the unit: by its id, or for an earlier version, which had no id, by the prefix in
    it.
    """
    first, second = _head(path)
    if second.startswith(_ID):
        return first.startswith(_HEAD) and second.removeprefix(_ID) == record.id
    return first == f"{_HEAD}{record.prefix}"


def _head(path: Path) -> tuple[str, str]:
    """The first two lines of a unit that is a plain file."""
    if path.is_symlink() or not path.is_file():
        return "", ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[:2]
    return lines[0] if lines else "", lines[1] if len(lines) > 1 else ""


def _systemctl(*words: str) -> str:
    """Call the user's systemd; returns the reason of a failure, "" on success."""
    program = shutil.which("systemctl")
    if program is None:
        return "there is no systemctl here"
    try:
        answer = subprocess.run(
            [program, "--user", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemctl does not answer: {error}"
    said = answer.stderr.strip().splitlines()
    return (
        ""
        if answer.returncode == 0
        else f"systemctl --user {words[0]} failed: {said[-1] if said else f'status {answer.returncode}'}"
    )


def _escaped(text: str) -> str:
    """The text, escaped so that systemd expands nothing."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """One word of a unit's line."""
    return '"' + _escaped(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'
