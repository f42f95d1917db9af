"""What `onedesk memory` tells: the truth of this machine or of a copied /proc, the budget made from it, and who holds what."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..api import pick_device
from ..config import Config
from ..memory.budget import MemorySettings, make_budget, show
from ..memory.meminfo import read_vmstat
from ..memory.truth import read_truth
from ..registry import REGISTRY
from .console import columns

HERE = Path("/proc")


def memory_report(config: Config, *, device: str, proc: Path | None) -> dict[str, Any]:
    """The document of `onedesk memory`. Bytes are integers.

    With `proc`, a copy of another machine's /proc, no device of this machine is asked; a copy of its sys/fs/cgroup is read beside it
    when it is there. Raises FileError when meminfo cannot be read, RequestError when the settings cannot be met.
    """
    values: dict[str, Any] = dict(config.memory)
    settings = MemorySettings(**values)
    if proc is None:
        truth = read_truth(pick_device(device).type)
        pools = {id(model.pool): model.pool for model in REGISTRY.models()}
        leases = [lease for pool in pools.values() for lease in pool.leases()]
    else:
        truth, leases = read_truth("cpu", proc=proc, cgroup=proc.parent / "sys" / "fs" / "cgroup"), []
    budget = make_budget(truth, settings)
    return {
        "truth": asdict(truth),
        "budget": {
            "limit": budget.limit,
            "kept_back": budget.kept_back,
            "floor": budget.floor,
            "used": sum(lease.nbytes for lease in leases),
        },
        "leases": [
            {
                "owner": lease.owner,
                "kind": lease.kind,
                "bytes": lease.nbytes,
                "residency": lease.residency,
                "policy": "stay",
                "idle": lease.idle,
            }
            for lease in leases
        ],
        "counters": dict(read_vmstat(proc or HERE)),
    }


def memory_table(report: dict[str, Any]) -> str:
    """The document for a terminal."""
    truth, budget = report["truth"], report["budget"]
    lines: list[tuple[str, ...]] = [("TRUTH", ""), *_truth_lines(truth), ("", ""), ("BUDGET", "")]
    lines += [(f"  {name.replace('_', ' ')}", show(nbytes)) for name, nbytes in budget.items()]
    text = columns(lines)
    held = [("OWNER", "KIND", "BYTES", "WHERE", "POLICY", "IDLE")]
    held += [
        (lease["owner"], lease["kind"], show(lease["bytes"]), lease["residency"], lease["policy"], f"{lease['idle']:.0f} s")
        for lease in report["leases"]
    ]
    return text + "\n\n" + (columns(held) if report["leases"] else "nothing is leased")


def _truth_lines(truth: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("  total", show(truth["total"])), ("  available", f"{show(truth['available'])} (by {truth['rule']})")]
    if truth["device_free"] is not None:
        lines.append(("  device free", show(truth["device_free"]) + (" (page cache counts as used there)" if truth["integrated"] else "")))
    lines.append(("  page cache", show(truth["page_cache"])))
    pressure = truth["psi_some_avg10"]
    lines.append(("  pressure", "not measured by this kernel" if pressure is None else f"{pressure:.2f} % of the last 10 s"))
    return lines
