"""Passes the user's pip settings for reaching an index to the installer's pip. Standard library only.

PIP_TARGET, PIP_PYTHON, `target` or `python` in a pip.conf and similar settings would install into another environment
than ours. So pip reads no configuration file here. The settings below are taken from the user's files and variables,
and passed as variables.
"""

from __future__ import annotations

import configparser
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

LOG = logging.getLogger(__name__)
PASSED = (
    *("index-url", "extra-index-url", "no-index", "find-links", "trusted-host", "proxy", "cert", "client-cert"),
    *("timeout", "retries", "constraint"),
)
# Later sections win; `download` applies to ComfyUI's source package.
_SECTIONS = ("global", "download", "install")
_PREFIX = "PIP_"


def pip_environment(variables: Mapping[str, str], environment: Path | None = None) -> dict[str, str]:
    """`variables` with the permitted pip settings of the user, and without all other pip variables.

    `environment` is the folder of the virtual environment whose pip runs; it can have a pip.conf too.
    """
    settings: dict[str, str] = {}
    for file in _files(variables, environment):
        settings |= _read(file)
    for name, value in variables.items():
        if name.upper().startswith(_PREFIX) and (setting := _setting(name[len(_PREFIX) :])) in PASSED:
            settings[setting] = value
    kept = {name: value for name, value in variables.items() if not name.upper().startswith(_PREFIX)}
    passed = {_PREFIX + setting.upper().replace("-", "_"): value for setting, value in settings.items()}
    return kept | passed | {"PIP_CONFIG_FILE": os.devnull}


def _files(variables: Mapping[str, str], environment: Path | None) -> Iterator[Path]:
    """pip's configuration files as documented, the highest priority last."""
    named = variables.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in reversed((variables.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
        yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    if not (named and Path(named).exists()):
        home = Path(variables.get("HOME") or Path.home())
        yield home / ".pip" / "pip.conf"
        yield Path(variables.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if environment is not None:
        yield environment / "pip.conf"
    if named:
        yield Path(named)


def _read(file: Path) -> dict[str, str]:
    """The permitted settings of a file; an unreadable file is skipped with a log line."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, configparser.Error) as error:
        LOG.info("pip       %s cannot be read and counts for nothing: %s", file, str(error).splitlines()[0])
        return {}
    found = {}
    for section in _SECTIONS:
        if parser.has_section(section):
            found |= {_setting(name): value for name, value in parser.items(section) if _setting(name) in PASSED}
    return found


def _setting(name: str) -> str:
    """A setting's name as on pip's command line, without the leading dashes."""
    return name.lower().replace("_", "-").removeprefix("--")
