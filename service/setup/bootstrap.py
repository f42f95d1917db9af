"""Run a module of this package before the package is installed anywhere: `python bootstrap.py MODULE [arguments ...]`.

Only the standard library is needed. The name `onedesk` is given to the checkout that contains this file, without
running its __init__.py and without writing anything into it.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def main() -> int:
    """Import onedesk.service.setup.MODULE and return the result of its main(arguments)."""
    sys.dont_write_bytecode = True
    package = types.ModuleType("onedesk")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["onedesk"] = package
    module = importlib.import_module(f"onedesk.service.setup.{sys.argv[1]}")
    return module.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
