"""The command `onedesk`: reads the command line and runs one subcommand. Exit 0 success, 1 failure, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from ..config import own_version
from ..console import (
    PrintableFormatter,
    UsageError,
    discard_stdout,
    failure,
    make_streams_safe,
    printable,
    write_json,
)
from ..errors import Cancelled, OnedeskError
from . import bench, chat, demo, describe, doctor, generate, knowledge, memory, models, pull, quantize, score, serve
from .options import FAILURE, INTERRUPTED, USAGE, Parser, Subcommands, as_typed

log = logging.getLogger(__name__)

# In the order of `onedesk --help`.
SUBCOMMANDS = (generate, chat, describe, score, models, pull, quantize, memory, knowledge, doctor, bench, serve, demo)
NO_COMMAND = 'no command was given; try onedesk models, or onedesk generate "a cat on a mat"; onedesk --help lists all'
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_FORMATS = ("onedesk: %(message)s", logging.BASIC_FORMAT)  # the logger's name is useful with -v only


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    make_streams_safe()
    try:
        status = _run(arguments, as_json="--json" in options)
        sys.stdout.flush()
    except OSError as error:
        discard_stdout()
        if not isinstance(error, BrokenPipeError):
            print(
                f"onedesk: cannot write to stdout ({error.strerror}); free disk space or redirect it", file=sys.stderr
            )
        return FAILURE
    return status


def _run(arguments: list[str], *, as_json: bool) -> int:
    args = argparse.Namespace()
    try:
        if not arguments:
            raise UsageError(NO_COMMAND)
        args, unknown = make_parser().parse_known_args(arguments)
        if unknown:
            hint = "" if unknown[0].startswith("-") else "; put a text of several words in quotes"
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(PrintableFormatter(_FORMATS[args.verbose > 0]))
        logging.basicConfig(handlers=[handler], level=_LEVELS[min(args.verbose, 2)], force=True)
        return args.run(args)
    except UsageError as error:
        return _fail(error, USAGE, as_json)
    except (KeyboardInterrupt, Cancelled):
        return _fail(Cancelled("interrupted"), INTERRUPTED, as_json)
    except BrokenPipeError:
        raise
    except (OnedeskError, OSError, RuntimeError, MemoryError, ImportError) as error:
        # RuntimeError: torch, when a device fails or is out of memory; ImportError: torch is missing (see onedesk
        # doctor)
        log.debug("the command failed", exc_info=True)
        return _fail(error, FAILURE, as_json, args)


def _fail(error: Exception, status: int, as_json: bool, args: argparse.Namespace | None = None) -> int:
    message = as_typed(error, args or ())
    if as_json:
        write_json(failure(error, message))
    else:
        print(printable(f"onedesk: {message}"), file=sys.stderr)
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; the namespace it returns has `run`, the function of the chosen subcommand."""
    epilog = "onedesk models lists what can be opened; onedesk COMMAND --help shows the options of a command."
    about = "Qwen next to your image models in one memory pool, offline."
    parser = Parser("onedesk", description=about, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"onedesk {own_version()}")
    subcommands = Subcommands(parser)
    for subcommand in SUBCOMMANDS:
        subcommand.add_to(subcommands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
