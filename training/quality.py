"""What int8 and int4 cost: perplexity of a writer's right answers to held-out ideas, by the form of its weights.

python -m training.quality [--model models/onedesk-demo-writer] [--ideas 160] [--seed 77] [--json FILE]
Only the answers' tokens count: what the writer was trained to say. Everything runs through the project's own engine, on
the CPU; forms that are not made on load are converted once, into a folder that is thrown away.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from onedesk.service.api import OpenModel, open_model
from onedesk.service.cli.quantize import quantize_model
from onedesk.service.config import Config
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth

from . import evaluate, examples, ideas

WRITER = Path(__file__).resolve().parents[1] / "models" / "onedesk-demo-writer"
CONTEXT = 512
Answers = list[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class Form:
    """A choice of --quant; `group` and `symmetric` are for int4, and None for conversion on load."""

    quant: str
    group: int | None = None
    symmetric: bool = True


FORMS = (
    Form("none"),
    Form("int8"),
    Form("int4"),
    Form("int4", 128, symmetric=False),
    Form("int4", 32),
    Form("int4", 32, symmetric=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    """`change`: of the perplexity relative to the stored weights; `divergence`: mean of |log p - log p as stored| over
    the tokens.
    """

    format: str
    weight_bytes: int
    tokens: int
    perplexity: float
    change: float
    divergence: float


def held_out_answers(model: OpenModel, count: int, seed: int) -> Answers:
    """Ids of `count` conversations with held-out ideas up to the answer, and of the right answer with its end."""
    rng, found = random.Random(seed), []
    for idea, style in evaluate.asked_for(evaluate.held_out_ideas(count, seed)):
        system = None if style == "none" else ideas.preset(style)
        text = ideas.answer(idea, "natural" if style == "none" else style, rng)
        found.append((model.encode(examples.chat(system, idea.text)), model.encode(text + "<|im_end|>\n")))
    return found


def answer_logprobs(model: OpenModel, answers: Answers) -> list[float]:
    """log-probability of every token of the answers."""
    return [value for given, answer in answers for value in model.score([*given, *answer])[len(given) - 1 :]]


def measure(folder: Path, count: int, seed: int, config: Config, forms: Sequence[Form] = FORMS) -> Iterator[Row]:
    """A row per form; converted weights are kept in the config's cache. The first form is the reference."""
    stored: list[float] = []
    for form in forms:
        if form.group is not None:
            quantize_model(str(folder), form.quant, form.group, form.symmetric, config)
        pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
        opened = open_model(
            folder, pool=pool, context=CONTEXT, quant=form.quant, device="cpu", kernel_cache=config.cache
        )
        with closing(opened) as model:
            found = answer_logprobs(model, held_out_answers(model, count, seed))
            stored = stored or found
            yield _row(model, stored, found)


def _row(model: OpenModel, stored: list[float], found: list[float]) -> Row:
    perplexity, before = (math.exp(-sum(values) / len(values)) for values in (found, stored))
    divergence = sum(abs(one - other) for one, other in zip(found, stored, strict=True)) / len(found)
    return Row(model.weight_format, model.need.weights, len(found), perplexity, perplexity / before - 1, divergence)


def main() -> None:
    """Print a table, and save it as JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WRITER)
    parser.add_argument("--ideas", type=int, default=160)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onedesk-quality-") as place:
        rows = _printed(measure(arguments.model, arguments.ideas, arguments.seed, Config(tree=Path(place))))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


def _printed(measured: Iterator[Row]) -> list[Row]:
    rows = []
    print(f"{'format':<22}{'weights MB':>11}{'tokens':>8}{'perplexity':>12}{'change':>10}{'|d log p|':>11}")
    for row in measured:
        rows.append(row)
        figures = f"{row.weight_bytes / 1e6:>11.2f}{row.tokens:>8}{row.perplexity:>12.5f}"
        figures += f"{row.change:>+10.3%}{row.divergence:>11.5f}"
        print(f"{row.format:<22}{figures}", flush=True)
    return rows


if __name__ == "__main__":
    main()
