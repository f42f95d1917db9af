"""Display of nodes: text that is safe to show, and one line of statistics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ..service.core import Progress, Result
from ..service.memory.budget import show as show_bytes
from ..service.memory.pool import Released

# The page gets the whole text ten times per second; more than this is no use there.
SHOWN_CHARACTERS = 20_000
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|[\ud800-\udfff]")
_FINISH = {
    "stop": "finished by itself",
    "length": "cut at the token limit",
    "stop_string": "ended at a stop string",
    "repetition": "ended because it repeated itself",
    "cancelled": "stopped",
}


def displayable(text: str) -> str:
    """The end of a text, with control characters that a page or a console would interpret as U+FFFD; line ends and tabs
    stay.
    """
    shown = _CONTROL.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
    return shown if len(shown) <= SHOWN_CHARACTERS else "… " + shown[-SHOWN_CHARACTERS:]


_SOURCE = {"request": "as asked", "checkpoint": "the model's generation_config.json", "family": "advice for its family"}


class View:
    """The display of a working node: written by the working thread, read by another one."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self._render: Callable[[], str] = str
        self._sent_text = ""
        self._load: Progress | None = None
        self._work: Progress | None = None
        self._sent_progress: Progress | None = None

    def write(self, text: str) -> None:
        """Show `text` instead of the previous text."""
        self._render = lambda: text

    def follow(self, render: Callable[[], str]) -> None:
        """Show the result of `render` at each look; it is called by the reading thread."""
        self._render = render

    def report(self, progress: Progress) -> None:
        """Move the node's progress bar. May be called from several threads: prefill overlaps with the rest of
        the load.
        """
        if progress.stage == "load":
            self._load = progress
        else:
            self._work = progress

    def changes(self) -> tuple[str | None, Progress | None]:
        """The text and the progress, each None unless it has changed since the last call."""
        text, load, work = self._render(), self._load, self._work
        # While both run, the slower one is shown: the load until it is done.
        progress = load if load is not None and (work is None or load.done < load.total) else work
        new_text = text if text != self._sent_text else None
        new_progress = progress if progress is not self._sent_progress else None
        self._sent_text, self._sent_progress = text, progress
        return new_text, new_progress


def statistics(model: str, result: Result) -> str:
    """One line: tokens, speeds, seconds, the effective seed, the finish reason, and the sampling values in force."""
    usage = result.usage
    first, total = result.seconds["first_token"], result.seconds["total"]
    speed = (
        f", {(usage.completion - 1) / (total - first):.1f} tokens/s" if usage.completion > 1 and total > first else ""
    )
    thought = f" ({usage.reasoning} of them thinking)" if usage.reasoning else ""
    kept = f" ({usage.cached} kept from before)" if usage.cached else ""
    loading = f"load {result.seconds['load']:.2f} s, " if result.seconds.get("load") else ""
    return (
        f"{model}: {usage.prompt} tokens read{kept}, {usage.completion} written{thought}{speed}; {loading}first token"
        f" {first:.2f} s, total {total:.2f} s; seed {result.seed}; {_FINISH[result.finish]}{_in_force(result)}"
    )


def _in_force(result: Result) -> str:
    """The sampling values, grouped by their source; those without effect are left out."""
    by_source: dict[str, list[str]] = {}
    for name, one in result.sampling.items():
        if one.source != "default":
            by_source.setdefault(one.source, []).append(f"{name} {one.value:g}")
    return "".join(f"; {', '.join(values)} ({_SOURCE[source]})" for source, values in by_source.items())


def returned(released: Iterable[Released]) -> str:
    """The evicted models: requested and measured bytes, and seconds. "" for none."""
    items = list(released)
    if not items:
        return ""
    asked, measured = sum(item.asked for item in items), sum(item.measured for item in items)
    owners = ", ".join(dict.fromkeys(item.owner for item in items))
    seconds = sum(item.seconds for item in items)
    return f"gave way: {owners}, asked {show_bytes(asked)}, measured {show_bytes(measured)} back in {seconds:.2f} s"


def evicted(times: int, given: Iterable[Released]) -> str:
    """How often ComfyUI evicted a model, and what the last eviction returned. "" for never."""
    if not times:
        return ""
    items = list(given)
    asked, measured = sum(item.asked for item in items), sum(item.measured for item in items)
    often = "once" if times == 1 else f"{times} times"
    return f"ComfyUI took the room {often}, last asked {show_bytes(asked)}, measured {show_bytes(measured)} back"


def numbered(texts: Sequence[str], total: int) -> str:
    """Several answers in sequence, each with its number; a single one unchanged."""
    return (
        texts[0]
        if total == 1 and texts
        else "\n\n".join(f"[{number}/{total}] {text}" for number, text in enumerate(texts, 1))
    )
