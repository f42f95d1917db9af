"""`onedesk score`: log-probabilities and perplexity of a text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ..config import load_config
from ..console import Stop, UsageError, read_text_file, write_json
from .model_options import opened
from .options import SUCCESS, Subcommands, named_path, token_ids
from .pictures import add_images, picture_documents, read_pictures


def add_to(subcommands: Subcommands) -> None:
    """Add `score` to the command."""
    parser = subcommands.add("score", run, "Log-probabilities and perplexity of a text.")
    parser.add_argument("--ids", type=token_ids, metavar="1,2,3", help="raw token ids, at most the context")
    text = "a UTF-8 text; one longer than the context is scored in windows"
    parser.add_argument("--text-file", type=named_path, metavar="F", help=text)
    add_images(parser)


def run(args: argparse.Namespace) -> int:
    """Score the ids or the text file; returns the exit status."""
    from ..engine.scoring import perplexity

    if (args.ids is None) == (args.text_file is None):
        raise UsageError("score needs either --ids or --text-file; see onedesk score --help")
    if args.image and args.ids is None:
        raise UsageError("--image goes with --ids, in which the image token stands once per picture")
    text = None if args.text_file is None else read_text_file(args.text_file)
    pictures, images = read_pictures(args.image), None
    stop = Stop()
    with stop.listening(), opened(args, load_config(args.config)) as model:
        logprobs: Sequence[float | None]
        if pictures:
            images = picture_documents(model, args.image, pictures, args.pixels)
            logprobs, windows = model.score_pictures(args.ids, pictures, args.pixels, cancel=stop), 1
        elif text is None:
            logprobs, windows = model.score(args.ids, cancel=stop), 1
        else:
            logprobs, windows = model.score_text(text, cancel=stop)
    known = [one for one in logprobs if one is not None]
    score = {"tokens": len(logprobs) + 1, "logprobs": logprobs, "perplexity": perplexity(known), "windows": windows}
    if images is not None:
        score["images"] = images
    if args.json:
        write_json(score)
    else:
        figure = f"perplexity {score['perplexity']:.7g}" if known else "no perplexity (the first token has no context)"
        print(f"{figure} over {_counted(score['tokens'], 'token')} in {_counted(windows, 'window')}")
    return SUCCESS


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
