"""The report of `onedesk memory`: the memory of this machine or of a copied /proc, the budget made from it, and all
leases.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..api import pick_device
from ..config import Config
from ..console import columns
from ..memory.backends.choose_backend import BackendReport, describe_backends
from ..memory.budget import MemorySettings, make_budget, show
from ..memory.claims import promised_elsewhere
from ..memory.lease import LeaseInfo
from ..memory.meminfo import read_vmstat
from ..memory.truth import read_truth
from ..peers.service import find_service
from ..peers.wire import ask
from ..registry import REGISTRY

HERE = Path("/proc")


def memory_report(config: Config, *, device: str, proc: Path | None) -> dict[str, Any]:
    """The document of `onedesk memory`. Bytes are integers. Leases and their counters are those of this process's
    pools.

    With `proc`, a copy of another machine's /proc, no device of this machine is queried; a copy of its sys/fs/cgroup
    next to it is read where it exists. Raises FileError when meminfo is unreadable, RequestError when the settings
    cannot be met.
    """
    values: dict[str, Any] = dict(config.memory)
    pools = [] if proc else list({id(model.pool): model.pool for model in REGISTRY.models()}.values())
    kind = "cpu" if proc else pick_device(device).type
    truth = read_truth("cpu", proc=proc, cgroup=proc.parent / "sys" / "fs" / "cgroup") if proc else read_truth(kind)
    promised = 0 if proc or pools else promised_elsewhere(kind, truth)
    budget = pools[0].budget if pools else make_budget(truth, MemorySettings(**values), promised=promised)
    leases = [lease for pool in pools for lease in pool.leases()]
    return {
        "truth": asdict(truth) | {"checkpoint_pages": sum(pool.files.cached() for pool in pools)},
        "budget": asdict(budget) | {"used": sum(pool.used() for pool in pools)},
        "leases": [_lease(lease) for lease in leases],
        "counters": {**read_vmstat(proc or HERE), **(asdict(pools[0].counters()) if pools else {})},
        "leaks": [] if proc else [asdict(report) for report in REGISTRY.leak_reports()],
        "backends": [] if proc else [asdict(found) for found in describe_backends(kind)],
    }


def with_service(report: dict[str, Any], config: Config) -> dict[str, Any]:
    """The document of `onedesk memory` with the budget, leases and counters of this tree's running service, if any.
    Raises PeerError.
    """
    found = find_service(config.cache)
    if found is None:
        return report
    theirs = ask(found.address, "GET", "/memory")
    service = {"pid": found.note.pid, "where": found.note.where, "asleep": theirs["asleep"]}
    kept = {key: theirs[key] for key in ("budget", "leases", "counters", "leaks")}
    pages = {"checkpoint_pages": theirs["truth"].get("checkpoint_pages", 0)}
    return report | kept | {"service": service, "truth": report["truth"] | pages}


def _lease(lease: LeaseInfo) -> dict[str, Any]:
    held = {"owner": lease.owner, "kind": lease.kind, "bytes": lease.nbytes, "residency": lease.residency}
    return held | {"policy": str(lease.policy), "idle": lease.idle}


def memory_table(report: dict[str, Any]) -> str:
    """The document for a terminal; `backends` may be left out."""
    truth, budget = report["truth"], report["budget"]
    lines: list[tuple[str, ...]] = [("TRUTH", ""), *_truth_lines(truth), ("", ""), ("BUDGET", "")]
    lines += [(f"  {name.replace('_', ' ')}", show(nbytes)) for name, nbytes in budget.items()]
    text = columns(lines)
    held = [("OWNER", "KIND", "BYTES", "WHERE", "POLICY", "IDLE")]
    held += [
        (
            lease["owner"],
            lease["kind"],
            show(lease["bytes"]),
            lease["residency"],
            lease["policy"],
            f"{lease['idle']:.0f} s",
        )
        for lease in report["leases"]
    ]
    parts = [text, columns(held) if report["leases"] else "nothing is leased"]
    if report.get("backends"):
        rows = [("MEMORY", "WHERE", "CAN")]
        rows += [(found["name"], found["residency"], abilities(BackendReport(**found))) for found in report["backends"]]
        parts.append(columns(rows))
    return "\n\n".join([*parts, *(leak_table(leaks) for leaks in report["leaks"])])


def abilities(found: BackendReport) -> str:
    """What this kind of memory supports on this machine and what it does not, in one line."""
    if found.missing:
        return f"not used: {found.missing}"
    can, cannot = ([name for name, works in found.can.items() if works is wanted] for wanted in (True, False))
    return ", ".join(can) + (f"; not {', '.join(cannot)}" if cannot else "")


def leak_table(leaks: dict[str, Any]) -> str:
    """Memory by stage over the last uses of one handle (a LeakReport as a dict), for a terminal or a node."""
    rows = [("STAGE", "LEFT BEHIND", "MEDIAN", "LAST")]
    rows += [
        (name, show(stage["total"]), show(stage["median"]), show(stage["last"]))
        for name, stage in leaks["stages"].items()
    ]
    grew = leaks["grew"]
    verdict = "no stage grows" if grew is None else f"{grew} grows: {show(leaks['stages'][grew]['total'])}"
    head = (
        f"{leaks['owner']}: {show(leaks['outside'])} of the process beside the leases; over the last {leaks['uses']}"
        f" uses {verdict}"
    )
    return f"{head}\n{columns(rows)}"


def _truth_lines(truth: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("  total", show(truth["total"])), ("  available", f"{show(truth['available'])} (by {truth['rule']})")]
    if truth["device_free"] is not None:
        lines.append(
            (
                "  device free",
                show(truth["device_free"]) + (" (page cache counts as used there)" if truth["integrated"] else ""),
            )
        )
    ours = truth["checkpoint_pages"]
    kept = f" ({show(ours)} of them checkpoint files, dropped first)" if ours else ""
    lines.append(("  page cache", show(truth["page_cache"]) + kept))
    pressure = truth["psi_some_avg10"]
    lines.append(
        ("  pressure", "not measured by this kernel" if pressure is None else f"{pressure:.2f} % of the last 10 s")
    )
    return lines
