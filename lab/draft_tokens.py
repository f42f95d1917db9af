"""What n-gram draft tokens gain or cost, on texts that suit them and texts that do not, generated with and without
drafts in turn.

    python -m onedesk.lab.draft_tokens [--model NAME] [--quant none|int8|int4] [--tokens 192] [--cycles 5] [--json]

`lost`: any token of the vocabulary; nothing recurs, and the drafts of a random multi-token prediction layer are wrong.
`misled`: twelve tokens at random, so that every latest pair has occurred before and eleven of twelve draft tokens are
wrong: the worst case. `copied`: greedy over three tokens, a text that soon repeats itself. `drafted` (checkpoints with
that layer): as lost, but 85 of a hundred draft tokens are replaced by the tokens that follow, the rate of published
layers. The layer does its work; only its draft tokens are replaced.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ..service.api import OpenModel, open_model
from ..service.bench.onedesk_subject import NEVER
from ..service.bench.run import end_tokens, find_model, random_prompt
from ..service.cache.paged import SequenceKV
from ..service.catalog.inventory import model_roots
from ..service.config import Config, load_config
from ..service.console import columns, write_json
from ..service.core import Request, Sampling
from ..service.engine.drafting import Drafting
from ..service.engine.runner import Runner
from ..service.errors import ModelError, OnedeskError
from ..service.loader.checkpoint import Checkpoint, open_checkpoint
from ..service.loader.names import ModelRoots
from ..service.memory.budget import MemorySettings
from ..service.memory.pool import Pool
from ..service.memory.truth import read_truth

log = logging.getLogger(__name__)

PROMPT = 128
FIRST_TOKEN = 100  # a small vocabulary is this token and those after it
# Above all scores of other tokens, so only tokens with this bias are chosen.
ALWAYS = 1e5


@dataclass(frozen=True, slots=True)
class DraftCase:
    """A kind of text: how many different tokens it has (0: all), whether decoding is greedy, and how many of a hundred
    draft tokens are right (None: as they come).
    """

    name: str
    vocabulary: int
    greedy: bool
    right: int | None = None


CASES = (DraftCase("lost", 0, False), DraftCase("misled", 12, False), DraftCase("copied", 3, True))
DRAFTED = DraftCase("drafted", 0, False, 85)


class ToldDrafting:
    """Runs a real Drafting but returns other tokens: those of `written`, the text after a prompt, and now and then a
    wrong one.
    """

    def __init__(self, drafting: Drafting, right: int, prompt: int, written: Sequence[int]) -> None:
        self._drafting, self._right, self._prompt, self._written = drafting, right / 100, prompt, written
        self._draw = torch.Generator().manual_seed(prompt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafting, name)

    def draft(self, text: SequenceKV, latest: int, token: int, count: int) -> list[int]:
        """See Drafting."""
        drafted, at = self._drafting.draft(text, latest, token, count), latest + 1 - self._prompt
        come = [*self._written[at : at + count], *drafted][: len(drafted)]
        right = (torch.rand(len(come), generator=self._draw) < self._right).tolist()
        return [token if is_so else (token + 1) % 97 for token, is_so in zip(come, right, strict=True)]


def measure_guesses(
    model: str, quant: str, tokens: int, cycles: int, config: Config, roots: ModelRoots
) -> dict[str, Any]:
    """One row per case: median seconds with and without drafts, their ratio (above 1: drafts cost time), and how many
    texts differ.

    Raises ModelError, FileError, MemoryFull, RequestError.
    """
    path = find_model(model, config, roots)
    checkpoint = open_checkpoint(path, roots=roots.bases)
    values: dict[str, Any] = dict(config.memory)
    pool = Pool("cpu", MemorySettings(**values), lambda: read_truth("cpu"))
    opened = open_model(
        path, pool=pool, roots=roots, context=PROMPT + tokens, quant=quant, device="cpu", kernel_cache=config.cache
    )
    with closing(opened):
        opened.load()
        cases = (*CASES, DRAFTED) if _runner(opened).drafting is not None else CASES
        rows = [_row(opened, checkpoint, case, tokens, cycles) for case in cases]
    return {
        "kind": "guesses",
        "model": checkpoint.name,
        "quant": quant,
        "tokens": tokens,
        "cycles": cycles,
        "rows": rows,
    }


def _row(model: OpenModel, checkpoint: Checkpoint, case: DraftCase, tokens: int, cycles: int) -> dict[str, Any]:
    seconds: dict[bool, list[float]] = {False: [], True: []}
    differing = 0
    for seed in range(cycles + 1):  # the first one is a warm-up
        written = {}
        for guess in (False, True) if seed % 2 or case.right is not None else (True, False):
            with _told(model, case, written.get(False, ())) if guess else nullcontext():
                spent, written[guess] = _write(model, _request(checkpoint, case, tokens, seed, guess=guess))
            if seed:
                seconds[guess].append(spent)
        differing += written[True] != written[False]
        log.info("%s, cycle %d of %d", case.name, seed, cycles)
    ratios = [with_guesses / without for with_guesses, without in zip(seconds[True], seconds[False], strict=True)]
    return {
        "case": case.name,
        "with_seconds": statistics.median(seconds[True]),
        "without_seconds": statistics.median(seconds[False]),
        "ratio": statistics.median(ratios),
        "worst_ratio": max(ratios),
        "differing_texts": differing,
    }


@contextmanager
def _told(model: OpenModel, case: DraftCase, written: Sequence[int]) -> Iterator[None]:
    """Within the block, replace the draft tokens if the case sets how many are right."""
    runner = _runner(model)
    drafting = runner.drafting
    if drafting is not None and case.right is not None:
        runner.drafting = cast(Drafting, ToldDrafting(drafting, case.right, PROMPT, written))
    try:
        yield
    finally:
        runner.drafting = drafting


def _runner(model: OpenModel) -> Runner:
    if model.session is None:
        raise ModelError(f"{model.name} gave way while it was measured; measure it with more memory free")
    return model.session.runner


def _write(model: OpenModel, request: Request) -> tuple[float, tuple[int, ...]]:
    """Seconds between the first token and the last, and the ids."""
    times: list[float] = []
    ids: tuple[int, ...] = ()
    for event in model.generate(request):
        if event.token is not None:
            times.append(time.perf_counter())
        if event.result:
            ids = event.result.ids
    return times[-1] - times[0], ids


def _request(checkpoint: Checkpoint, case: DraftCase, tokens: int, seed: int, *, guess: bool) -> Request:
    bias = dict.fromkeys(end_tokens(checkpoint), NEVER)
    prompt = random_prompt(checkpoint, PROMPT, seed)
    if case.vocabulary:
        bias |= dict.fromkeys(range(FIRST_TOKEN, FIRST_TOKEN + case.vocabulary), ALWAYS)
        prompt = [FIRST_TOKEN + token % case.vocabulary for token in prompt]
    sampling = Sampling(temperature=0.0 if case.greedy else 1.0, top_k=0, top_p=1.0, logit_bias=bias, seed=seed)
    return Request(
        ids=tuple(prompt),
        sampling=sampling,
        max_tokens=tokens,
        prefix_reuse=False,
        speculation=guess,
        repetition_stop=False,
    )


def summary(document: dict[str, Any]) -> str:
    """The document for people."""
    rows = [
        (
            row["case"],
            *(f"{document['tokens'] / row[key]:.1f}" for key in ("without_seconds", "with_seconds")),
            f"{row['ratio']:.3f}",
            f"{row['worst_ratio']:.3f}",
            str(row["differing_texts"]),
        )
        for row in document["rows"]
    ]
    titles = ("TEXT", "TOKENS/s WITHOUT", "WITH GUESSES", "TIME WITH / WITHOUT", "WORST OF ALL", "DIFFERING TEXTS")
    head = (
        f"guesses on {document['model']}, {document['quant']}: {document['tokens']} tokens, medians of"
        f" {document['cycles']}"
    )
    return f"{head}\n{columns([titles, *rows])}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if a text differs with drafts."""
    parser = argparse.ArgumentParser(prog="guesses", description="measure what guessing tokens gains or costs")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--quant", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="one document on stdout, the summary on stderr")
    args = parser.parse_args(argv)
    if args.tokens < 2 or args.cycles < 1:
        parser.error("--tokens begins at 2 and --cycles at 1")
    try:
        config = load_config(args.config)
        document = measure_guesses(args.model, args.quant, args.tokens, args.cycles, config, model_roots(config))
    except OnedeskError as error:
        write_json({"error": {"type": type(error).__name__, "message": str(error)}})
        return 1
    (sys.stderr if args.json else sys.stdout).write(summary(document))
    if args.json:
        write_json(document)
    return 1 if any(row["differing_texts"] for row in document["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
