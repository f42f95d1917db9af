"""Run the command of the package in a folder: where ComfyUI loads it from custom_nodes, it is not installed under its name.

python launch_service.py PACKAGE_FOLDER COMMAND [options]
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

NAME = "onedesk"


def main(folder: str, arguments: list[str]) -> int:
    """Load the folder as the package `onedesk`, whatever else is installed, and run its command; returns the exit status."""
    place = Path(folder)
    spec = importlib.util.spec_from_file_location(NAME, place / "__init__.py", submodule_search_locations=[str(place)])
    if spec is None or spec.loader is None:
        return 2
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)
    return import_module(f"{NAME}.service.cli.command").main(arguments)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files are no modules of their own
    sys.exit(main(sys.argv[1], sys.argv[2:]))
