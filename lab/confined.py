"""Random choices of limit, model, context and image, each in a real memory limit and a process of its own. No process
may be killed. A refusal must come before loading, with correct figures.

    python -m onedesk.lab.confined --count 200
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..service.api import OpenModel
from ..service.bench.shapes import SHAPES, write_random
from ..service.config import Config, load_config
from ..service.console import write_json
from ..service.core import Request, Sampling
from ..service.engine.leaks import own_bytes
from ..service.errors import MemoryFull, ModelError, OnedeskError, RequestError
from ..service.kernels.cpu.compile import compile_library
from ..service.loader.checkpoint import open_checkpoint
from ..service.memory.budget import MIB
from ..service.memory.pool import Pool
from ..service.registry import REGISTRY
from ..service.work_folder import work_folder
from .memory_group import MemoryGroup

# Size of the weights in MB, and the change to the shape: (hidden, layers, intermediate, vocabulary). BF16.
MODELS: Mapping[str, tuple[int, int, int, int]] = {
    "8": (256, 2, 768, 8192),
    "27": (512, 4, 1024, 8192),
    "88": (768, 6, 2048, 8192),
    "227": (1024, 8, 3072, 16384),
    "532": (1280, 12, 3840, 32768),
    "956": (1536, 16, 4608, 32768),
}
KV_HEADS, HEAD_DIM = 2, 128
LIMITS = (192 * MIB, 3072 * MIB)
PICTURES = (8 * MIB, 1536 * MIB)
CONTEXTS = (256, 1024, 4096, 8192)
FLOORS = (64 * MIB, 128 * MIB, 512 * MIB)
IDS = tuple(range(5, 21))
TOKENS = 4
LIMIT_SHARE, KEPT_BACK, HEADROOM = 0.70, 0.05, 0.20  # the design's numbers, repeated here on purpose
TOLERANCE = 2 * MIB  # what the process takes between two readings
NEAR = 12 * MIB  # this close to the limit both answers are right: the budget was made some imports earlier
REFUSED_GROWTH = 4 * MIB  # a refusal allocates headers and Python objects, never weights

Picture = Literal["drawn", "refused", "not asked"]


@dataclass(frozen=True, slots=True)
class ConfinedCase:
    """One case. `leased`: the image is a lease of the pool; otherwise a plain allocation after the pool was asked to
    free memory.
    """

    model: str
    limit: int
    context: int
    picture: int
    floor: int
    leased: bool


@dataclass(frozen=True, slots=True)
class ConfinedOutcome:
    """What a child observed. `available` is the product's figure, `expected` comes from the group's own files, read at
    the same time.
    """

    fits: bool
    message: str
    weights: int
    kv: int
    scratch: int
    available: int
    expected: int
    most: int
    growth: int
    picture: Picture
    picture_most: int
    same_text: bool
    woken: bool
    suggested: int
    suggestion_works: bool | None


def random_cases(count: int, seed: int, models: Sequence[str]) -> list[ConfinedCase]:
    """`count` cases, sizes log-uniform; every second limit is close to what the model takes."""
    dice = random.Random(seed)  # noqa: S311 - the same cases for one seed

    def between(low: float, high: float) -> int:
        return int(low * (high / low) ** dice.random()) // 4096 * 4096

    cases = []
    for number in range(count):
        model, context, floor = dice.choice(models), dice.choice(CONTEXTS), dice.choice(FLOORS)
        _, layers, _, _ = MODELS[model]
        takes = int(model) * 1e6 + layers * 2 * KV_HEADS * HEAD_DIM * 4 * context
        limit = between(*LIMITS) if number % 2 else max(LIMITS[0], between(0.8 * takes + floor, 3.5 * takes + floor))
        cases.append(ConfinedCase(model, limit, context, between(*PICTURES), floor, dice.random() < 0.5))
    return cases


def checkpoint_of(model: str, cache: Path) -> Path:
    """The folder of a random checkpoint of MODELS, written at its first use."""
    folder = cache / "confined" / model
    if (folder / "config.json").is_file():
        return folder
    hidden, layers, intermediate, vocabulary = MODELS[model]
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }
    heads = {"num_attention_heads": hidden // HEAD_DIM, "num_key_value_heads": KV_HEADS}
    with work_folder(folder.parent, model) as started:
        whole = started / model
        whole.mkdir()
        write_random(whole, {**SHAPES["qwen3-0.6b"], **shape, **heads})
        whole.rename(folder)
    return folder


# In the child


def _try_case(case: ConfinedCase, folder: Path, group: MemoryGroup, config: Config) -> ConfinedOutcome:
    group.join()
    REGISTRY.configure(replace(config, memory={"floor": case.floor}))
    pool = REGISTRY.pool("cpu")
    model = REGISTRY.open(folder, context=case.context, device="cpu", load=False)
    own, expected = own_bytes(), group.limit - group.usage + group.droppable
    need, room = model.need, pool.room()
    figures = (need.weights, need.kv, need.scratch, room.available, expected, room.most)
    try:
        first = _write(model)
    except MemoryFull as refusal:
        growth, untouched = own_bytes() - own, pool.allocations == 0 and pool.used() == 0
        context = _suggested_context(str(refusal))
        works = _works(folder, context) if context else None
        return ConfinedOutcome(
            False,
            str(refusal),
            *figures,
            growth if untouched else case.limit,
            "not asked",
            0,
            True,
            True,
            context,
            works,
        )
    picture, most = _draw(case, pool)
    message, same, woken = "", True, True
    try:
        same = _write(model) == first
    except MemoryFull as refusal:
        message, woken = str(refusal), False
    pool.verify()
    return ConfinedOutcome(True, message, *figures, 0, picture, most, same, woken, 0, None)


def _write(model: OpenModel) -> tuple[int, ...]:
    request = Request(ids=IDS, sampling=Sampling(seed=3), max_tokens=TOKENS)
    results = [event.result for event in model.generate(request) if event.result]
    return results[-1].ids


def _draw(case: ConfinedCase, pool: Pool) -> tuple[Picture, int]:
    """Draw if the pool says that the image fits; also returns the most bytes that the pool reported."""
    most = pool.room().most
    if case.leased:
        try:
            lease = pool.lease("picture", "scratch", case.picture)
        except MemoryFull:
            return "refused", most
        lease.tensor.fill_(1)
        lease.release()
        return "drawn", most
    room = pool.room()
    if room.machine < case.picture:
        pool.make_room(case.picture)
        room = pool.room()
    if room.machine < case.picture:
        return "refused", room.machine
    torch.empty(case.picture, dtype=torch.uint8).fill_(1)
    return "drawn", room.machine


def _suggested_context(message: str) -> int:
    """The context length that a refusal names as one that fits, 0 if it names none."""
    _, found, rest = message.partition("a context of ")
    return int(rest.split()[0]) if found else 0


def _works(folder: Path, context: int) -> bool:
    try:
        model = REGISTRY.open(folder, context=context, device="cpu", load=False)
        return len(_write(model)) > 0
    except (MemoryFull, RequestError):
        return False


# In the parent


def run_case(case: ConfinedCase, folder: Path, config: Config, number: int) -> tuple[ConfinedOutcome | None, int, int]:
    """The outcome, None if the child was ended; the kernel's kills; how often the limit was reached."""
    with MemoryGroup(f"onedesk-{os.getpid()}-{number}", case.limit) as group:
        answer = _in_child(lambda: asdict(_try_case(case, folder, group, config)))
        kills, hits = group.kills, group.hits
    return (ConfinedOutcome(**answer) if answer is not None else None), kills, hits


def _in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Run `work` in a forked process; returns its result, or None if it ended without one. Raises the child's
    OnedeskError.

    Forks before any thread or parallel region exists here: a new interpreter per case would take two seconds for
    imports each time.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            answer = work()
            os.write(writer, json.dumps(answer).encode())
            status = 0
        except (OnedeskError, RuntimeError, OSError, MemoryError) as error:
            os.write(writer, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        return None
    document = json.loads(answer)
    if "error" in document:
        raise ModelError(f"a confined process failed: {document['error']}")
    return document


def faults_of(case: ConfinedCase, folder: Path, outcome: ConfinedOutcome | None, kills: int) -> list[str]:
    """The faults of a case; none if it worked or was refused correctly."""
    if outcome is None or kills:
        return [f"killed ({kills} by the kernel)"]
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4 * case.context
    found = []
    if not checkpoint.weight_bytes <= outcome.weights <= 1.01 * checkpoint.weight_bytes:
        found.append(f"weights are said to be {outcome.weights}, the file has {checkpoint.weight_bytes}")
    if outcome.kv != kv:
        found.append(f"KV is said to be {outcome.kv}, {case.context} tokens take {kv}")
    if abs(outcome.available - outcome.expected) > TOLERANCE:
        found.append(f"available is said to be {outcome.available}, the group has {outcome.expected}")
    need = math.ceil((outcome.weights + outcome.kv + outcome.scratch) * (1 + HEADROOM))
    within = min(outcome.expected * LIMIT_SHARE, outcome.expected - case.floor) * (1 - KEPT_BACK)
    most = min(within, outcome.expected - case.floor)
    if abs(need - most) > NEAR and outcome.fits != (need <= most):
        found.append(f"{'taken' if outcome.fits else 'refused'}, although {need} are needed and {int(most)} can be had")
    if not outcome.fits and outcome.growth > REFUSED_GROWTH:
        found.append(f"refused, but not before {outcome.growth} bytes were taken")
    if outcome.suggestion_works is False:
        found.append(f"a context of {outcome.suggested} was said to fit, and did not")
    if outcome.picture != "not asked" and abs(case.picture - outcome.picture_most) > NEAR:
        drawn = case.picture < outcome.picture_most
        if drawn != (outcome.picture == "drawn"):
            found.append(f"the picture of {case.picture} was {outcome.picture} with room for {outcome.picture_most}")
    if not outcome.woken and most - need > NEAR:
        found.append(
            f"it fitted with {int(most) - need} bytes to spare, and was refused when it was to wake: {outcome.message}"
        )
    if not outcome.same_text:
        found.append("the text differs after the hand-over")
    return found


def run_confined(count: int, *, seed: int, config: Config, models: Sequence[str] = tuple(MODELS)) -> dict[str, Any]:
    """Run `count` random cases; the document has counts by outcome, and the faults. Raises FileError without root."""
    cases = random_cases(count, seed, models)
    folders = {model: config.cache / "confined" / model for model in models}
    for model in models:
        _in_child(lambda model=model: {"folder": str(checkpoint_of(model, config.cache))})
    compile_library(config.cache)  # a compiler inside a case would count towards its limit, and outlive it
    gc.freeze()  # the garbage collector skips existing objects, so a child does not copy their pages
    started, became, wrong, kills, hits = time.perf_counter(), Counter[str](), [], 0, 0
    for number, case in enumerate(cases):
        outcome, killed, reached = run_case(case, folders[case.model], config, number)
        kills, hits = kills + killed, hits + reached
        became[_became(case, outcome)] += 1
        faults = faults_of(case, folders[case.model], outcome, killed)
        if faults:
            wrong.append(
                {"case": asdict(case), "faults": faults, "outcome": None if outcome is None else asdict(outcome)}
            )
    return {
        "kind": "confined",
        "count": count,
        "seed": seed,
        "kills": kills,
        "limit_reached": hits,
        "became": dict(became),
        "wrong": wrong,
        "seconds": time.perf_counter() - started,
    }


def _became(case: ConfinedCase, outcome: ConfinedOutcome | None) -> str:
    if outcome is None:
        return "killed"
    if outcome.fits:
        return f"written, the picture {outcome.picture}" + (
            "" if outcome.woken else ", refused to wake by what the process had grown"
        )
    beyond = outcome.weights + outcome.kv + outcome.scratch > outcome.expected
    return f"refused: more than {'the machine has' if beyond else 'the budget'}" + (
        ", a smaller context fits" if outcome.suggested else ""
    )


def main() -> int:
    """Run from the command line; exit 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS), help="weights in MB, of " + ", ".join(MODELS))
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args()
    try:
        document = run_confined(
            args.count, seed=args.seed, config=load_config(args.config), models=args.models.split(",")
        )
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    write_json(document)
    return 1 if document["wrong"] or document["kills"] else 0


if __name__ == "__main__":
    sys.exit(main())
