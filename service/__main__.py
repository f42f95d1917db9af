"""The way into the command: an interrupt while it is still being imported ends it as any other does, without a
traceback.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not __package__:
    # By its path, `python -I .../service COMMAND`: the package is the folder around this one, and this folder holds no
    # modules of its own.
    import runpy
    from pathlib import Path

    sys.path.pop(0)
    launcher = runpy.run_path(str(Path(__file__).with_name("launch_module.py")), run_name="launch_module")
    launcher["main"](str(Path(__file__).resolve().parent.parent), "", "onedesk.service", sys.argv[1:])

import signal


def main() -> int:
    """Run the command of sys.argv; returns its exit status."""
    try:
        from .cli.command import main as command

        return command()
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            sys.stdout.write('{"error": {"type": "Cancelled", "message": "interrupted"}}\n')
        else:
            sys.stderr.write("onedesk: interrupted\n")
        return 130
    finally:
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # what Python takes apart at its exit would print tracebacks of its own


if __name__ == "__main__":
    sys.exit(main())
