"""The output of a pull: its plan, then a line per event, and on a terminal one line of progress."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from ..console import columns, wrapped, write_json
from ..hub.progress import ProgressReading

if TYPE_CHECKING:
    from ..hub.plan import PullPlan

LINE_SECONDS = 10.0  # between two lines of progress if stderr is not a terminal
CLEAR = "\r\x1b[K"


class Reporter:
    """Receives events. With `as_json` each is one JSON line on stdout; otherwise text for people goes to stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._terminal = not as_json and sys.stderr.isatty()
        self._shown = time.monotonic()
        self._line = False

    def __call__(self, event: dict[str, Any]) -> None:
        if self._json:
            write_json(event)
            sys.stdout.flush()
        elif event["event"] == "progress":
            self._progress(ProgressReading(event["bytes"], event["total"], event["rate"], event["remaining"]).line)
        else:
            text = _text(event)
            if text:
                self.end()
                print(text, file=sys.stderr, flush=True)

    def _progress(self, line: str) -> None:
        now = time.monotonic()
        if self._terminal:
            sys.stderr.write(CLEAR + line)
            sys.stderr.flush()
            self._line = True
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line of progress."""
        if self._line:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self._line = False


def _text(event: dict[str, Any]) -> str:
    kind, path = event["event"], event.get("path")
    if kind == "file":
        return f"{event['state']:<8}  {path}  {size(event['size'])}"
    if kind == "retry":
        return (
            f"waiting   {path or 'the hub'}: {event['reason']}; attempt {event['attempt'] + 1} in {event['wait']:.0f} s"
        )
    if kind == "restart":
        return f"restart   {path}: {event['reason']}; {size(event['lost'])} are fetched again"
    if kind == "resume":
        return f"resume    {path} at {size(event['done'])} of {size(event['size'])}"
    if kind == "fallback":
        return f"no answer from {event['host']}: {event['reason']}"
    if kind == "checking":
        return f"checking  {path}  {size(event['size'])}, which is there already"
    if kind == "removed":
        return f"removed   {path}: {event['reason']}"
    return f"warning: {event['text']}" if kind == "warning" else ""


def size(count: int) -> str:
    """Bytes in decimal units, as the hubs show them."""
    for unit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {letter}"
    return f"{count} B"


def plan_text(plan: PullPlan) -> str:
    """The plan for a terminal."""
    document = plan.document()
    rows = [("FILE", "SIZE", "STATE")]
    rows += [(file.path, size(file.file.size), _state(file.state, file.done)) for file in plan.files]
    gated = ", gated: its terms must be accepted on its page" if plan.gated else ""
    head = f"{document['repo']} at {document['commit'][:12]} from {document['source']}; "
    head += f"licence {plan.license or 'not stated'}{gated}"
    verdict = {True: "it", False: "it", None: "whether it fits is not known:"}[plan.fit.fits]
    counted = f"{len(plan.files)} {'file' if len(plan.files) == 1 else 'files'}"
    lines = [*wrapped(head, "")]
    if plan.renamed:
        lines += wrapped(f"{plan.name} is now called {plan.renamed}", "")
    lines += [columns(rows)]
    lines += wrapped(
        f"{counted}, {size(plan.bytes)}, of which {size(plan.missing)} are missing in "
        f"{document['folder']}; "
        f"the disk has {size(document['disk_free'])} free",
        "",
    )
    lines += wrapped(f"{verdict} {plan.fit.text}", "")
    for warning in plan.warnings:
        lines += wrapped(f"not verified: {warning}", "")
    return "\n".join(lines)


def _state(state: str, done: int) -> str:
    return f"{size(done)} there" if state == "partial" else state
