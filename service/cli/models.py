"""`onedesk models`: which models can be opened, and whether they fit."""

from __future__ import annotations

import argparse

from ..config import load_config
from ..console import write_json
from .options import SUCCESS, Subcommands, rate


def add_to(subcommands: Subcommands) -> None:
    """Add `models` to the command."""
    parser = subcommands.add("models", run, "The models that can be opened, whether they fit, and the speed to expect.")
    speed = "expect the decode speed of a machine whose memory reads this much, such as 273GB/s; default: this one"
    parser.add_argument("--bandwidth", type=rate, metavar="RATE", help=speed)


def run(args: argparse.Namespace) -> int:
    """Print a row per model; returns the exit status."""
    from ..api import pick_device
    from ..bench.machine_speed import machine_speed
    from ..catalog.inventory import model_rows, model_table

    config = load_config(args.config)
    speed = machine_speed(pick_device(args.device).type, config.cache, args.bandwidth)
    rows = model_rows(config, args.model, device=args.device, context=args.context, quant=args.quant, speed=speed)
    write_json(rows) if args.json else print(model_table(rows))
    return SUCCESS
