"""Run a module of the package in a folder under the name onedesk, whatever else is installed under that name. Standard
library only.

    python -I launch_module.py PACKAGE_FOLDER USER_SITE MODULE [arguments]

USER_SITE is a folder of site-packages to add, or empty.
"""

from __future__ import annotations

import importlib.util
import runpy
import site
import sys
from pathlib import Path

NAME = "onedesk"


def load_package(folder: Path) -> None:
    """Load the package in `folder` as `onedesk`. Raises ImportError if there is none."""
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a package; install it again")
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    spec.loader.exec_module(package)


def main(folder: str, user_site: str, module: str, arguments: list[str]) -> None:
    """Run `module` as the main module; it ends the process."""
    if user_site:
        site.addsitedir(user_site)
    load_package(Path(folder))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not sys.flags.isolated:
        sys.path.pop(0)  # this folder: its files are no modules of their own
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
