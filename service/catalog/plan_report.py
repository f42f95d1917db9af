"""A plan (see plan_model) for a terminal: no line is wider than WIDTH, except commands to copy."""

from __future__ import annotations

from typing import Any

from ..console import columns, wrapped
from ..memory.budget import show
from ..peers.cluster import cluster_text
from .decode_speed import shown_speed

INDENT = "  "
_PARTS = ("file", "weights", "table", "kv", "scratch")
_TITLES = ("FITS", "CONTEXT", "FILES", "WEIGHTS", "TABLE", "KV", "SCRATCH", "TOKENS/s")


def plan_table(document: dict[str, Any]) -> str:
    """The document for a terminal. Forms that fit come first, and among them those that Onedesk runs itself; each with
    its figures and notes.
    """
    forms = sorted(document["forms"], key=lambda row: (not row["fits"], row["engine"] != "onedesk"))
    titles, *figures = columns([_TITLES, *map(_figures, forms)]).splitlines()
    lines = [*_head(document), "", "FORM", INDENT + titles]
    for row, line in zip(forms, figures, strict=True):
        lines += [*wrapped(row["format"], ""), INDENT + line, *wrapped(row["why"], INDENT)]
    several = document.get("cluster")
    return "\n".join(lines) + (f"\n\n{several['format']}: {cluster_text(several)}" if several else "")


def _head(document: dict[str, Any]) -> list[str]:
    unit, letter = (1e9, "B") if document["parameters"] >= 1e8 else (1e6, "M")
    kinds = ", ".join(f"{kind} {count / unit:,.2f}" for kind, count in document["kinds"].items() if count >= unit / 200)
    counted = (
        f"{document['parameters'] / unit:,.1f} {letter} parameters, {document['active_parameters'] / unit:,.1f}"
        f" {letter} active"
    )
    nodes = f" on each of {document['nodes']} nodes" if document["nodes"] > 1 else ""
    memory = (
        f"{show(document['memory'])} of memory{nodes}, {show(document['images'])} for images: {show(document['room'])}"
        " for a model"
    )
    rate = document["read_bytes_per_second"]
    speed = (
        "no speed is estimated: name the machine's memory bandwidth, such as --bandwidth 273GB/s"
        if rate is None
        else f"memory reads {rate / 1e9:,.1f} GB/s; TOKENS/s: to expect at batch 1, after a short text"
    )
    return [
        *wrapped(f"{document['model']} ({document['family']}): {counted}; by kind: {kinds}", ""),
        *wrapped(memory, ""),
        *wrapped(speed, ""),
    ]


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    speed = shown_speed(row["expected_tokens_per_second"])
    context = f"{row['context']:,}" if row["context"] else "-"
    return "yes" if row["fits"] else "no", context, *(show(row["bytes"][part]) for part in _PARTS), speed
