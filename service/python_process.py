"""How another Python is started: no file of the working directory can be imported there as a module. Standard library
only.

A script or -m without -I would put the script's folder, the working directory, PYTHONPATH or the user's site-packages
on sys.path, where a torch.py next to a cloned model would be imported instead of torch. Python 3.10 has no -P, so it is
-I.
"""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("launch_module.py")
# Variables of Python that say nothing about where modules come from.
_HARMLESS = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONHASHSEED")
# A folder in which nobody else can put files.
SAFE_FOLDER = "/"


def isolated_command(*words: str | Path, python: str | Path | None = None) -> list[str]:
    """The command line of a Python of ours (default: this one); `words` are a script's path, or -m with a module,
    and arguments.
    """
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    # Bytecode goes where ours goes, never into the checkout.
    cache = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return [str(python or sys.executable), *flags, *cache, *map(str, words)]


def package_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module` of this very package, under whatever name and from whatever folder it was
    loaded.
    """
    own = site.getusersitepackages()
    user_site = (
        own if own in sys.path else ""
    )  # -I leaves it out; where torch was installed into it, the child needs it too
    return isolated_command(_LAUNCHER, Path(__file__).resolve().parent.parent, user_site, module, *arguments)


def probe_command(python: str | Path, code: str) -> list[str]:
    """The command line that runs `code` as the programs of another environment's Python run, its user's site-packages
    included.

    Start it in SAFE_FOLDER with python_environment().
    """
    return [str(python), "-c", f"import sys; sys.path[:] = [folder for folder in sys.path if folder]\n{code}"]


def python_environment() -> dict[str, str]:
    """Our variables without those that lead a Python to other modules (PYTHONPATH, PYTHONHOME, PYTHONSTARTUP and the
    like).
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") or name in _HARMLESS}
