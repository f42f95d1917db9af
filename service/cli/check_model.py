"""`onedesk doctor --check MODEL`: generates the same text five times, compares every byte and state, and names the
first difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..api import OpenModel, open_model, pick_device
from ..config import Config
from ..core import Message, Request, Result, Sampling
from ..errors import OnedeskError
from ..loader.names import ModelRoots
from ..memory.budget import MemorySettings, show
from ..memory.machine_pool import make_pool
from ..memory.pool import LeaseDamagedError, Pool, Released
from .check_operators import check_operators
from .check_quantized import compared, listen
from .examine import Check

RUNS = 5
# The model is released and loaded again once, so that a fault of the file or of reading it shows too.
READ_ANEW_AFTER = 3
TOKENS = 24
CONTEXT = 512
SEED = 20
PROMPT = "Describe a red cat on a mat in one sentence."
PROMPT_IDS = tuple(range(3, 51))


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One run: the answer's ids and text, checksums of the residual state per number of blocks, the leases that were
    overwritten.
    """

    answer: tuple[tuple[int, ...], str, str]
    states: tuple[int, ...]
    damage: str


def check_model(
    name: str, config: Config, roots: ModelRoots, *, device: str, context: int | None = None, quant: str = "none"
) -> list[Check]:
    """Open `name` in a separate pool with guard zones, generate the same text RUNS times with one seed, and compare
    everything.

    Then compare the weights as stored with those in `quant`, or with every available quantization. If the model cannot
    be opened, there is one failure with the reason. End the process after a damaged lease.
    """
    desk = _ModelOpener(name, config, roots, device, context)
    try:
        with closing(desk.open(quant)) as model:
            opened_with = (
                f"{model.name}: {model.layers} layers, {show(model.need.weights)} in {model.weight_format};"
                f" {model.kernels}"
            )
            checks = [Check("opened", "ok", opened_with), *_runs(model, desk.pool)]
            # With the model's own sampling, which an accelerator computes too.
            checks.append(check_operators(desk.pool.device, lambda: _result(model, _request(model))))
            others = [*model.need.weights_of] if quant == "none" else ["none"]
            if not others or any(check.status == "failure" for check in checks):
                return checks
            voices = {quant: listen(model, _request(model))}
        for form in others:
            with closing(desk.open(form)) as model:
                voices[form] = listen(model, _request(model))
        return checks + [compared(voices["none"], voice, form) for form, voice in voices.items() if form != "none"]
    except OnedeskError as error:
        return [Check("opened", "failure", str(error), "correct what the message names, then check again")]


class _ModelOpener:
    """Opens one model in any quantization, in a pool with guard zones."""

    def __init__(self, name: str, config: Config, roots: ModelRoots, device: str, context: int | None) -> None:
        values: dict[str, Any] = dict(config.memory) | {"debug": True}
        kind = pick_device(device).type
        self.pool = make_pool(kind, MemorySettings(**values))
        self._name, self._config, self._roots, self._context = name, config, roots, context or CONTEXT

    def open(self, quant: str) -> OpenModel:
        """The model, loaded. Raises OnedeskError."""
        path, cache = self._roots.find(self._name), self._config.cache
        options: dict[str, Any] = {
            "quant": quant,
            "device": self.pool.device,
            "kernel_cache": cache,
            "draft": self._config.draft,
        }
        return open_model(path, pool=self.pool, roots=self._roots, context=self._context, **options)


def _runs(model: OpenModel, pool: Pool) -> list[Check]:
    weights, runs, released = [model.weight_checksums()], [], ()
    for run in range(1, RUNS + 1):
        runs.append(_run(model, pool))
        if run == READ_ANEW_AFTER:
            weights.append(model.weight_checksums())
            released = model.give_way()
            weights.append(model.weight_checksums())
    weights.append(model.weight_checksums())
    return [_weights(weights), _states(runs), _texts(runs), _zones(runs), _release(released)]


def _run(model: OpenModel, pool: Pool) -> CheckRun:
    request = _request(model)
    ids = request.ids or tuple(model.encode(PROMPT))
    states = model.embed_prompt(ids, range(model.layers + 1)).split(model.hidden_size, dim=1)
    result = _result(model, request)
    damage = ""
    try:
        pool.verify()
    except LeaseDamagedError as error:
        damage = str(error)
    return CheckRun((result.ids, result.text, result.reasoning), tuple(checksum(state) for state in states), damage)


def _result(model: OpenModel, request: Request) -> Result:
    found = [event.result for event in model.generate(request) if event.result]
    return found[-1]


def _request(model: OpenModel) -> Request:
    # Every run prefills the whole prompt and uses no draft tokens, so all runs compute the same.
    same: dict[str, Any] = {
        "sampling": Sampling(seed=SEED),
        "max_tokens": TOKENS,
        "prefix_reuse": False,
        "speculation": False,
    }
    if (_folder(model.path) / "tokenizer.json").is_file():
        return Request(messages=(Message("user", PROMPT),), **same)
    return Request(ids=tuple(token % model.vocab_size for token in PROMPT_IDS), **same)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes, on any device."""
    return zlib.crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def _weights(found: Sequence[Mapping[str, int]]) -> Check:
    """`found`: the checksums before the first run, after the third, after the reload, after the last."""
    for then, now, when in (
        (0, 1, "while it wrote"),
        (1, 2, "when it was read again"),
        (2, 3, "while it wrote after being read again"),
    ):
        changed = [name for name in found[0] if found[then][name] != found[now][name]]
        if changed:
            detail = f"{changed[0]} changed {when}, and {len(changed) - 1} of {len(found[0])} tensors after it"
            return Check("weights", "failure", detail, _fix_of_bytes(when))
    return Check("weights", "ok", f"{len(found[0])} tensors are the same before, after, and read again")


def _fix_of_bytes(when: str) -> str:
    if "read again" in when and "wrote" not in when:
        return (
            "the file or its disk gives other bytes each time: check the disk, compare the file's hash with its source"
        )
    return "something writes over the weights: see the guard zones below; if they are whole, test the machine's memory"


def _states(runs: list[CheckRun]) -> Check:
    for number, run in enumerate(runs[1:], 2):
        for passed, (first, now) in enumerate(zip(runs[0].states, run.states, strict=True)):
            if first != now:
                where = f"layer {passed - 1}" if passed else "the embedding"
                fix = (
                    "with the weights unchanged, the computation of that layer is at fault: report it, with the kernels"
                    " named above"
                )
                return Check("states", "failure", f"run {number} differs from run 1 first behind {where}", fix)
    return Check(
        "states", "ok", f"the residual state behind each of {len(runs[0].states) - 1} layers is the same in all runs"
    )


def _texts(runs: list[CheckRun]) -> Check:
    different = [number for number, run in enumerate(runs, 1) if run.answer != runs[0].answer]
    if not different:
        return Check("texts", "ok", f"{len(runs)} runs at seed {SEED} wrote the same {len(runs[0].answer[0])} tokens")
    number = different[0]
    at = _first_difference(runs[0].answer[0], runs[number - 1].answer[0])
    detail = f"run {number} differs from run 1 from token {at} on; {len(different)} of {len(runs)} runs differ"
    return Check("texts", "failure", detail, "the first failure of weights, states or guard zones is the cause")


def _first_difference(first: Iterable[int], other: Iterable[int]) -> int:
    same = 0
    for one, two in zip(first, other, strict=False):
        if one != two:
            break
        same += 1
    return same


def _zones(runs: list[CheckRun]) -> Check:
    for number, run in enumerate(runs, 1):
        if run.damage:
            return Check(
                "guard zones",
                "failure",
                f"run {number}: {run.damage}",
                "a writer went outside its lease: report it with this line",
            )
    return Check("guard zones", "ok", "nothing was written outside a lease")


def _release(released: Iterable[Released]) -> Check:
    returns = list(released)
    asked, measured = sum(r.asked for r in returns), sum(r.measured for r in returns)
    short = [r for r in returns if r.share < 0.98]
    detail = f"{show(measured)} of {show(asked)} came back in {sum(r.seconds for r in returns):.3f} s"
    if short:
        return Check("giving way", "failure", detail, "something holds the rest: see the shortfalls in onedesk memory")
    return Check("giving way", "ok", detail)
