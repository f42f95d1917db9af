"""`onedesk memory`: the machine's memory, the part that Onedesk may use, and the owners that hold it."""

from __future__ import annotations

import argparse
import sys
import time

from ..config import load_config
from ..console import UsageError, write_json
from .options import SUCCESS, Subcommands, named_path

CLEAR = "\x1b[H\x1b[2J"  # clears a terminal's screen
WATCH_SECONDS = 1.0


def add_to(subcommands: Subcommands) -> None:
    """Add `memory` to the command."""
    parser = subcommands.add(
        "memory", run, "What the memory is, how much of it Onedesk may use, and which owners hold it."
    )
    parser.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    parser.add_argument("--proc", type=named_path, metavar="DIR", help="read another machine's copied /proc")


def run(args: argparse.Namespace) -> int:
    """Print the memory report, once or every second; returns the exit status."""
    from ..catalog.memory_report import memory_report, memory_table, with_service

    if args.watch and args.json:
        raise UsageError("--watch repeats a table and --json prints one document; give one of them")
    config = load_config(args.config)
    while True:
        report = memory_report(config, device=args.device, proc=args.proc)
        report = report if args.proc else with_service(report, config)
        if args.json:
            write_json(report)
        else:
            print((CLEAR if args.watch and sys.stdout.isatty() else "") + memory_table(report), flush=True)
        if not args.watch:
            return SUCCESS
        time.sleep(WATCH_SECONDS)
