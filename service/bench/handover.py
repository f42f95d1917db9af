"""Hand-overs, many times: open, generate, release, draw, wake, generate, close. Bytes returned, bytes left over, and
the texts.
"""

from __future__ import annotations

import gc
import logging
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ..api import OpenModel, open_model, pick_device
from ..config import Config
from ..console import columns
from ..core import Message, Request, Result, Sampling
from ..errors import FileError, ModelError
from ..loader.checkpoint import open_checkpoint
from ..loader.names import ModelRoots
from ..memory.budget import MIB, MemorySettings
from ..memory.machine_pool import make_pool
from ..memory.pool import Pool, Released
from ..memory.read_bandwidth import keep_ceiling, known_ceiling
from ..memory.truth import read_truth
from ..tree_names import DEMO_WRITER
from .ceiling import read_ceiling
from .peak_watch import status_bytes
from .run import find_model

log = logging.getLogger(__name__)

ROLLUP = Path("/proc/self/smaps_rollup")
# What exists only because this process holds it. File pages are left out: the kernel can drop them, and a library's are
# shared.
OWN_KEYS = ("Anonymous", "Swap", "Pss_Shmem")
PICTURE_BYTES = 256 * MIB  # about what a 1024 x 1024 picture of a small image model takes at its peak
PROMPT = Message("user", "a cat on a red mat, soft light")
PROMPT_IDS = tuple(range(3, 35))
SEED = 7
STEPS = ("give way", "close")
TITLES = ("STEP", "ASKED", "MEASURED", "SHARE", "WORST", "OF THE PROCESS, WORST", "SECONDS", "WORST")


@dataclass(frozen=True, slots=True)
class Handover:
    """One return of a model's leases, all of them together, in bytes and seconds. `gone` is what the process itself
    has less of.
    """

    leased: int
    asked: int
    measured: int
    gone: int
    seconds: float

    @property
    def share(self) -> float:
        """measured / asked."""
        return self.measured / self.asked if self.asked else 1.0


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle: its returns by step, its texts, seconds to the first token after opening and waking, and what the
    process has after.
    """

    returns: dict[str, Handover]
    answers: tuple[Any, ...]
    first_token: dict[str, float]
    own: int
    kept: dict[str, int]


def own_bytes() -> int:
    """Bytes that exist only because of this process, by the kernel's account of its pages."""
    lines = (line.split() for line in ROLLUP.read_text(encoding="ascii", errors="replace").splitlines())
    return sum(int(words[1]) * 1024 for words in lines if len(words) == 3 and words[0].rstrip(":") in OWN_KEYS)


def measure_handover(
    config: Config,
    roots: ModelRoots,
    *,
    model: str | None = None,
    device: str = "auto",
    cycles: int = 300,
    tokens: int = 16,
    picture: int = PICTURE_BYTES,
) -> dict[str, Any]:
    """The document of `onedesk bench handover`; bytes are integers, times seconds. Measured in this process, through
    `api`.

    `drift_bytes` is how much more the process holds at the end than after the first third of the cycles,
    `drift_peak_bytes` the most in between. Without `model`, the demo's language model is used if it is there, otherwise
    a small random checkpoint. Raises ModelError, FileError, MemoryFull.
    """
    name = model or _default_model(roots)
    path = find_model(name, config, roots)
    kind = pick_device(device).type
    checkpoint = open_checkpoint(path, roots=roots.bases)
    ceiling = known_ceiling(config.cache, kind)
    if ceiling is None:
        ceiling = read_ceiling(kind, available=read_truth(kind).available, cache=config.cache)
        keep_ceiling(config.cache, kind, ceiling)
    values: dict[str, Any] = dict(config.memory)
    pool = make_pool(kind, MemorySettings(**values))
    desk = _HandoverCycle(
        lambda: open_model(path, pool=pool, roots=roots, device=kind, load=False, kernel_cache=config.cache),
        pool,
        tokens,
        picture,
    )
    done: list[Cycle] = []
    gc.collect()
    gc.freeze()  # torch's 300,000 objects need not be looked at again after every cycle
    try:
        for count in range(1, cycles + 1):
            done.append(desk.cycle())
            log.info("hand-over %d of %d: the process holds %.1f MiB", count, cycles, done[-1].own / MIB)
    finally:
        gc.unfreeze()
    pool.verify()
    window = [cycle.own for cycle in done[cycles // 3 :]]
    return {
        "kind": "handover",
        "model": checkpoint.name,
        "quant": "none",
        "device": kind,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "read_bytes_per_second": ceiling,
        "cycles": cycles,
        "checkpoint_bytes": checkpoint.weight_bytes,
        "picture_bytes": picture,
        "different_texts": len({answer for cycle in done for answer in cycle.answers}) - 1,
        "drift_bytes": window[-1] - window[0],
        "drift_peak_bytes": max(window) - window[0],
        "drift_kept": {what: done[-1].kept[what] - done[cycles // 3].kept[what] for what in done[-1].kept},
        "shortfalls": pool.counters().shortfalls,
        "first_token_seconds": {
            when: statistics.median(cycle.first_token[when] for cycle in done) for when in ("open", "wake")
        },
        "own_bytes": [cycle.own for cycle in done],
        "rows": [_row(step, [cycle.returns[step] for cycle in done], tokens) for step in STEPS],
    }  # fmt: skip


def handover_table(document: dict[str, Any]) -> str:
    """The document for a terminal."""
    rows = [TITLES, *(_line(row) for row in document["rows"])]
    first = document["first_token_seconds"]
    kept = ", ".join(f"{what} {change:+d}" for what, change in document["drift_kept"].items())
    return (
        f"{document['cycles']} hand-overs of {document['model']} on {document['device']} ({document['machine']}),"
        f" medians\n{columns(rows)}\nfirst token {first['open']:.3f} s after opening, {first['wake']:.3f} s after"
        f" waking\nover the last two thirds the process grew by {document['drift_bytes'] / MIB:.2f} MiB (at most"
        f" {document['drift_peak_bytes'] / MIB:.2f}; {kept}); texts that differ: {document['different_texts']}"
    )


class _HandoverCycle:
    """Opens, writes, gives way; the picture is a plain allocation as an image model makes it, outside the pool."""

    def __init__(self, opened: Callable[[], OpenModel], pool: Pool, tokens: int, picture: int) -> None:
        self._open = opened
        self._pool = pool
        self._tokens = tokens
        self._picture = picture
        self._process = psutil.Process()

    def cycle(self) -> Cycle:
        model = self._open()
        first, opened = self._write(model)
        away = self._returned(model.give_way)
        self._draw()
        second, woken = self._write(model)
        closed = self._returned(model.close)
        times = {"open": opened, "wake": woken}
        gc.collect()
        return Cycle({"give way": away, "close": closed}, (first, second), times, own_bytes(), self._kept())

    def _write(self, model: OpenModel) -> tuple[Any, float]:
        """What was written, to be compared, and the seconds to its first token."""
        result: Result | None = None
        for event in model.generate(self._request(model)):
            result = event.result or result
        if result is None:
            raise ModelError(f"{model.name} ended a generation without a result")
        return (result.text, result.reasoning, result.ids), result.seconds["first_token"]

    def _request(self, model: OpenModel) -> Request:
        sampling = Sampling(seed=SEED)
        if (model.path / "tokenizer.json").is_file():
            return Request(messages=(PROMPT,), sampling=sampling, max_tokens=self._tokens)
        ids = tuple(token % model.vocab_size for token in PROMPT_IDS)
        return Request(ids=ids, sampling=sampling, max_tokens=self._tokens)

    def _returned(self, give: Callable[[], Sequence[Released]]) -> Handover:
        leased, before = self._pool.used(), own_bytes()
        started = time.perf_counter()
        released = give()
        seconds = time.perf_counter() - started
        return Handover(
            leased, sum(r.asked for r in released), sum(r.measured for r in released), before - own_bytes(), seconds
        )

    def _draw(self) -> None:
        """Take a picture's bytes, touch every page, and free them."""
        torch.empty(self._picture, dtype=torch.uint8, device=self._pool.device).fill_(1)
        if torch.device(self._pool.device).type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _kept(self) -> dict[str, int]:
        """What else a process can leak."""
        files = len(list(Path("/proc/self/fd").iterdir()))
        return {
            "threads": threading.active_count(),
            "open files": files,
            "children": len(self._process.children(recursive=True)),
        }


def _default_model(roots: ModelRoots) -> str:
    try:
        roots.resolve(DEMO_WRITER)
    except (ModelError, FileError):
        return "qwen3-toy"
    return DEMO_WRITER


def _row(step: str, returns: Sequence[Handover], tokens: int) -> dict[str, Any]:
    seconds = statistics.median(r.seconds for r in returns)
    measured = int(statistics.median(r.measured for r in returns))
    return {
        "step": step,
        "batch": 1,
        "tokens": tokens,
        "tokens_per_second": None,
        "leased": int(statistics.median(r.leased for r in returns)),
        "asked": int(statistics.median(r.asked for r in returns)),
        "measured": measured,
        "share": statistics.median(r.share for r in returns),
        "worst_share": min(r.share for r in returns),
        "worst_process_share": min(r.gone / r.asked if r.asked else 1.0 for r in returns),
        "seconds": seconds,
        "worst_seconds": max(r.seconds for r in returns),
        "bytes_per_second": measured / seconds,
        "peak_bytes": status_bytes("VmHWM"),
    }


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (f"{row['asked'] / MIB:.1f} MiB", f"{row['measured'] / MIB:.1f} MiB")
    shares = (f"{row['share']:.2%}", f"{row['worst_share']:.2%}", f"{row['worst_process_share']:.1%}")
    return (row["step"], *sizes, *shares, f"{row['seconds']:.4f}", f"{row['worst_seconds']:.4f}")
