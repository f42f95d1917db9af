"""`onedesk score`: log-probabilities and perplexity of a text."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config import load_config
from ..console import Stop, UsageError, read_text_file, write_json
from .model_options import opened
from .options import SUCCESS, Subcommands, token_ids


def add_to(subcommands: Subcommands) -> None:
    """Add `score` to the command."""
    parser = subcommands.add("score", run, "Log-probabilities and perplexity of a text.")
    parser.add_argument("--ids", type=token_ids, metavar="1,2,3", help="raw token ids, at most the context")
    text = "a UTF-8 text; one longer than the context is scored in windows"
    parser.add_argument("--text-file", type=Path, metavar="F", help=text)


def run(args: argparse.Namespace) -> int:
    """Score the ids or the text file; returns the exit status."""
    from ..engine.scoring import perplexity

    if (args.ids is None) == (args.text_file is None):
        raise UsageError("score needs either --ids or --text-file; see onedesk score --help")
    text = None if args.text_file is None else read_text_file(args.text_file)
    stop = Stop()
    with stop.listening(), opened(args, load_config(args.config)) as model:
        if text is None:
            logprobs, windows = model.score(args.ids, cancel=stop), 1
        else:
            logprobs, windows = model.score_text(text, cancel=stop)
    score = {"tokens": len(logprobs) + 1, "logprobs": logprobs, "perplexity": perplexity(logprobs), "windows": windows}
    if args.json:
        write_json(score)
    else:
        figure = f"perplexity {score['perplexity']:.7g}" if logprobs else "no perplexity (the first token has no context)"
        print(f"{figure} over {_counted(score['tokens'], 'token')} in {_counted(windows, 'window')}")
    return SUCCESS


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
