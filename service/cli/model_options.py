"""Shared by the subcommands that open a model: opening it, and the options of a request."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..console import UsageError
from ..core import Request, Sampling
from ..errors import RequestError
from .options import as_typed, number, whole

if TYPE_CHECKING:
    from ..api import OpenModel

NO_MODEL = "no model is named; use --model NAME, FOLDER or FILE (onedesk models lists the names)"


@contextmanager
def opened(args: argparse.Namespace, config: Config) -> Iterator[OpenModel]:
    """The model that --model names, or the default one; its weights load at its first use. Raises UsageError,
    ModelError, FileError.
    """
    from ..catalog.inventory import default_model, model_roots, usual_context
    from ..registry import REGISTRY

    name = default_model(config) if args.model is None else args.model
    if name is None:
        raise UsageError(NO_MODEL)
    REGISTRY.configure(config)
    roots = model_roots(config)
    path = roots.find(name)
    try:
        context = args.context or usual_context(config, path, roots)
        yield REGISTRY.open(path, roots=roots, context=context, quant=args.quant, device=args.device, load=False)
    finally:
        REGISTRY.close()


def checked_options(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The options of a request, checked before any file is read: a wrong value is a usage error. Raises UsageError."""
    if args.greedy and args.temperature:
        raise UsageError("--greedy and --temperature exclude each other; give one of them")
    sampling = Sampling(
        temperature=0.0 if args.greedy else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    options: dict[str, Any] = {
        "sampling": sampling,
        "max_tokens": args.max_tokens,
        "stop": tuple(args.stop),
        "thinking": args.thinking,
        "thinking_budget": args.thinking_budget,
        **more,
    }
    try:
        Request(ids=(0,), **options).validated()
    except RequestError as error:
        raise UsageError(as_typed(error, args)) from error
    return options


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """The options of a request that `generate` and `chat` share."""
    parser.add_argument("--system", metavar="S", help="the system prompt")
    parser.add_argument(
        "--max-tokens",
        type=whole,
        default=512,
        metavar="N",
        help="tokens of the answer, 1 or more; default %(default)s",
    )
    own = "default: the model's own"
    parser.add_argument(
        "--temperature", type=number, metavar="T", help=f"0 (always the most likely token) or more; {own}"
    )
    top_p = f"nucleus sampling: keep the most likely tokens up to probability mass P, above 0 to 1; {own}"
    parser.add_argument("--top-p", type=number, metavar="P", help=top_p)
    parser.add_argument("--top-k", type=whole, metavar="K", help=f"keep the K most likely tokens, 0: all; {own}")
    min_p = f"drop tokens below M times the top probability, 0 to 1; {own}"
    parser.add_argument("--min-p", type=number, metavar="M", help=min_p)
    parser.add_argument("--seed", type=whole, metavar="S", help="0 to 2^64-1; default: a random one, shown with --json")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="STR", help="end before this text; may be repeated"
    )
    thinking = "let the model reason first; auto, the default: as its chat template does"
    parser.add_argument("--thinking", choices=("on", "off", "auto"), default="auto", help=thinking)
    budget = "tokens of reasoning, 0 or more; default: what the context leaves besides the answer"
    parser.add_argument("--thinking-budget", type=whole, metavar="N", help=budget)
