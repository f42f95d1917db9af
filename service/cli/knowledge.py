"""`onedesk knowledge`: documents in a base, and search in them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import load_config
from ..console import Stop, UsageError, write_json, write_text
from ..errors import RequestError
from ..knowledge.base import KnowledgeBase, UpdateReport, base_of, bases
from .options import FAILURE, SUCCESS, Subcommands, whole_from

_ACTIONS = ("add", "update", "search", "list", "remove")
METHOD = "bm25"  # how pieces are found: by words alone


def add_to(subcommands: Subcommands) -> None:
    """Add `knowledge` to the command."""
    parser = subcommands.add("knowledge", run, "Keep documents in a base, and search them by words.")
    parser.add_argument("action", choices=_ACTIONS, help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the base; add makes it")
    parser.add_argument(
        "rest", nargs="*", metavar="PATH|QUERY", help="add: files and folders; search: what is looked for"
    )
    parser.add_argument("--count", type=whole_from(1), default=5, metavar="N", help="pieces to find; default: 5")


def run(args: argparse.Namespace) -> int:
    """Run the action; returns the exit status: 1 if a document could not be read."""
    tree = load_config(args.config).tree
    if tree is None:
        raise RequestError("knowledge bases belong to an installation; name its onedesk.toml with --config")
    folder = tree / "data" / "knowledge"
    if args.action == "list":
        return _list(folder, as_json=args.json)
    if args.name is None:
        raise UsageError(f"knowledge {args.action} needs the NAME of a base; onedesk knowledge list shows them")
    base = base_of(folder, args.name)
    if args.action == "search":
        return _search(base, " ".join(args.rest), args.count, as_json=args.json)
    if args.action == "remove":
        base.remove()
        _say({"removed": base.name}, f"removed {base.name}; its documents are where they were", as_json=args.json)
        return SUCCESS
    if args.action == "add" and not args.rest:
        raise UsageError("knowledge add needs at least one PATH after the NAME")
    if args.action == "add" and "" in args.rest:
        raise UsageError("knowledge add was given an empty PATH; name a file or folder")
    stop = Stop()
    with stop.listening():
        report = base.add([Path(path) for path in args.rest], stop) if args.action == "add" else base.update(stop)
    return _report(base, report, as_json=args.json)


def _list(folder: Path, *, as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for base in bases(folder):
        sources, pieces = base.counts()
        rows.append({"name": base.name, "sources": sources, "pieces": pieces, "bytes": base.file.stat().st_size})
    lines = [f"{row['name']}: {row['sources']} sources, {row['pieces']} pieces" for row in rows]
    _say(
        rows,
        "\n".join(lines) or "no knowledge base yet; make one with onedesk knowledge add NAME PATH",
        as_json=as_json,
    )
    return SUCCESS


def _search(base: KnowledgeBase, query: str, count: int, *, as_json: bool) -> int:
    found = base.search(query, count)
    lines = [
        f"[{number}] {piece.source}, {piece.heading or 'no heading'}, characters {piece.start}-{piece.end}\n"
        f"{piece.text.expandtabs(4)}\n"
        for number, piece in enumerate(found, 1)
    ]
    document = {"pieces": [asdict(piece) for piece in found], "method": METHOD}
    _say(document, "\n".join(lines) or f"nothing in {base.name} has these words", as_json=as_json)
    return SUCCESS


def _report(base: KnowledgeBase, report: UpdateReport, *, as_json: bool) -> int:
    sources, pieces = base.counts()
    failed = [{"source": path, "reason": reason} for path, reason in report.failed.items()]
    document = asdict(report) | {"name": base.name, "sources": sources, "pieces": pieces, "failed": failed}
    lines = [f"not read: {one['reason']} ({one['source']})" for one in failed]
    lines.append(
        f"{base.name}: {len(report.added)} added, {len(report.changed)} changed, {report.unchanged} unchanged,"
        f" {len(report.removed)} removed; {sources} sources, {pieces} pieces, found by words ({METHOD})"
    )
    _say(document, "\n".join(lines), as_json=as_json)
    return FAILURE if failed else SUCCESS


def _say(document: Any, text: str, *, as_json: bool) -> None:
    if as_json:
        write_json(document)
    else:
        write_text(text)
