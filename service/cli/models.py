"""`onedesk models`: which models can be opened, and whether they fit."""

from __future__ import annotations

import argparse

from ..config import load_config
from ..console import write_json
from .options import SUCCESS, Subcommands


def add_to(subcommands: Subcommands) -> None:
    """Add `models` to the command."""
    subcommands.add("models", run, "The models that can be opened, and whether they fit.")


def run(args: argparse.Namespace) -> int:
    """Print a row per model; returns the exit status."""
    from ..catalog.inventory import model_rows, model_table

    rows = model_rows(load_config(args.config), args.model, device=args.device, context=args.context, quant=args.quant)
    write_json(rows) if args.json else print(model_table(rows))
    return SUCCESS
