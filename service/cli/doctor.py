"""`onedesk doctor`: examine the installation, check one model, or plan for a model that is not here yet."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..config import load_config
from ..console import UsageError, write_json, write_text
from .options import FAILURE, SUCCESS, Subcommands, rate, size, whole_from

if TYPE_CHECKING:
    from ..catalog.decode_speed import DecodeSpeed
    from .examine import Check


def add_to(subcommands: Subcommands) -> None:
    """Add `doctor` to the command."""
    parser = subcommands.add("doctor", run, "Examine this installation, and say how to correct what is wrong.")
    parser.add_argument(
        "--check", metavar="MODEL", help="decode one text five times with this model and compare every byte"
    )
    parser.add_argument(
        "--plan", metavar="NAME|FOLDER", help="which form of this model would fit, from its config alone"
    )
    parser.add_argument(
        "--hub", action="store_true", help="ask each hub and mirror of [hub] once; this connects to them"
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="plan for a machine with this much memory, such as 121GiB"
    )
    parser.add_argument("--images", type=size, metavar="SIZE", help="plan next to image models that take this much")
    parser.add_argument(
        "--bandwidth",
        type=rate,
        metavar="RATE",
        help="expect the decode speed of a machine whose memory reads this much, such as 273GB/s; default: this one",
    )
    parser.add_argument(
        "--nodes", type=whole_from(1), default=1, metavar="N", help="plan for N such machines together; default 1"
    )


def run(args: argparse.Namespace) -> int:
    """Examine, check or plan; returns the exit status."""
    if args.plan is not None:
        return _plan(args)
    if args.nodes != 1 or any(value is not None for value in (args.memory, args.images, args.bandwidth)):
        raise UsageError("--memory, --images, --bandwidth and --nodes are for --plan; see onedesk doctor --help")
    if args.hub and args.check is not None:
        raise UsageError("--hub and --check exclude each other; give one of them")
    checks = _checks(args)
    ok = all(check.status != "failure" for check in checks)
    if args.json:
        write_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            write_text(
                f"{check.status:<8} {check.name}: {check.detail}" + (f"\n         {check.fix}" if check.fix else "")
            )
    return SUCCESS if ok else FAILURE


def _plan(args: argparse.Namespace) -> int:
    from ..catalog import plan, plan_report

    planned = plan.run(args, _speed(args))
    write_json(planned) if args.json else write_text(plan_report.plan_table(planned))
    return SUCCESS


def _speed(args: argparse.Namespace) -> DecodeSpeed | None:
    """The figures for speed estimates: of --bandwidth, of this machine, or none for another machine without it."""
    from ..bench.machine_speed import machine_speed
    from ..catalog.plan import planned_device

    if args.memory is not None and args.bandwidth is None:
        return None
    return machine_speed(planned_device(args.memory, args.device), load_config(args.config).cache, args.bandwidth)


def _checks(args: argparse.Namespace) -> list[Check]:
    if args.hub:
        from .check_hub import check_hubs

        return check_hubs(load_config(args.config))
    if args.check is None:
        from .examine import examine

        return examine(args.config, device=args.device)
    from ..catalog.inventory import model_roots
    from .check_model import check_model

    config = load_config(args.config)
    return check_model(
        args.check, config, model_roots(config), device=args.device, context=args.context, quant=args.quant
    )
