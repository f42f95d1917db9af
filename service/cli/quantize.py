"""`onedesk quantize`: convert a model's weights once, into the cache, where the next open with the same --quant finds
them.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..config import Config, load_config
from ..console import Stop, UsageError, show_progress, write_json
from ..core import CancelCheck, ProgressReport
from ..errors import RequestError
from .model_options import NO_MODEL
from .options import SUCCESS, Subcommands

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """The converted file, new or already there (`written` false). Sizes are bytes of tensors; `content` is the source's
    hash.
    """

    model: str
    quant: str
    format: str
    path: str
    source_bytes: int
    bytes: int
    content: str
    written: bool
    seconds: float


def add_to(subcommands: Subcommands) -> None:
    """Add `quantize` to the command."""
    parser = subcommands.add(
        "quantize", run, "Convert a model once to --quant int8 or int4; later openings use the result."
    )
    parser.add_argument("--group", type=int, choices=(128, 32), help="int4: weights per scale; default 128")
    parser.add_argument(
        "--asymmetric", action="store_true", help="int4: an offset per scale; a little better, a little larger"
    )


def run(args: argparse.Namespace) -> int:
    """Convert the model; returns the exit status. Raises UsageError and what `quantize_model` raises."""
    from ..catalog.inventory import default_model

    if args.quant == "none":
        raise UsageError("quantize needs --quant int8 or --quant int4")
    if args.quant != "int4" and (args.group or args.asymmetric):
        raise UsageError(f"--group and --asymmetric are for --quant int4, not {args.quant}")
    config = load_config(args.config)
    name = args.model or default_model(config)
    if name is None:
        raise UsageError(NO_MODEL)
    stop = Stop()
    with stop.listening():
        progress = None if args.json else show_progress
        done = quantize_model(name, args.quant, args.group, not args.asymmetric, config, progress=progress, cancel=stop)
    write_json(asdict(done)) if args.json else print(_summary(done))
    return SUCCESS


def _summary(done: ConversionSummary) -> str:
    """The conversion for a terminal."""
    from ..memory.budget import show

    how = f"made in {done.seconds:.1f} s" if done.written else "it was there already"
    return (
        f"{done.path}\n{done.format}, {show(done.bytes)}, {done.bytes / done.source_bytes:.0%} of the checkpoint; {how}"
    )


def quantize_model(
    name: str,
    quant: str,
    group: int | None,
    symmetric: bool,
    config: Config,
    *,
    progress: ProgressReport | None = None,
    cancel: CancelCheck | None = None,
) -> ConversionSummary:
    """Convert `name`, unless it is converted already. Raises ModelError, FileError, MemoryFull, RequestError,
    Cancelled.
    """
    from ..catalog.inventory import model_roots
    from ..kernels.choose import choose_kernels
    from ..loader.checkpoint import open_checkpoint
    from ..memory.budget import MemorySettings
    from ..memory.machine_pool import make_pool
    from ..model import convert
    from ..model.converted import converted_folder, open_converted
    from ..model.families import read_family
    from ..model.requantize import requantized
    from ..model.weights import plan_weights
    from ..quant.formats import CHOICES, DEFAULT_GROUP, int4

    roots = model_roots(config)
    family, described, checkpoint = read_family(open_checkpoint(roots.find(name), roots=roots.bases))
    aim = CHOICES[quant] if quant != "int4" else int4(group or DEFAULT_GROUP, symmetric=symmetric)
    plan = requantized(plan_weights(family.destinations(described), checkpoint, aim))
    if (
        not plan.staging_bytes(convert.CPU)
        or plan.form == plan_weights(family.destinations(described), checkpoint).form
    ):
        raise RequestError(
            f"{checkpoint.name} is stored quantized already ({plan.form}); open it as it is, with --quant none"
        )
    if plan.note:
        log.warning(plan.note)
    kernels = choose_kernels(convert.CPU, plan.dtype, config.cache)
    conversion = convert.Conversion(
        checkpoint, plan, quant, converted_folder(checkpoint, quant, config.cache), kernels.quantize
    )
    started = time.perf_counter()
    values: dict[str, Any] = dict(config.memory)
    pool = make_pool("cpu", MemorySettings(**values))
    lease = pool.lease(f"quantize {checkpoint.name}", "scratch", conversion.need)
    try:
        written = not convert.is_current(conversion, lease, progress, cancel)
        if written:
            convert.convert(conversion, lease, progress, cancel)
    finally:
        lease.release()
    content = open_converted(conversion.folder, quant).content
    sizes = checkpoint.weight_bytes, convert.file_bytes(plan)
    seconds = time.perf_counter() - started
    return ConversionSummary(
        checkpoint.name, quant, plan.form, str(conversion.folder.absolute()), *sizes, content, written, seconds
    )
