"""`onedesk describe`: describe images."""

from __future__ import annotations

import argparse

from ..config import load_config
from ..console import Stop, write_json
from ..core import Message, Request
from .model_options import add_request_options, checked_options, opened
from .options import FAILURE, INTERRUPTED, SUCCESS, Subcommands, named_path
from .output import answered, document, run_request
from .pictures import add_pixels, picture_documents, read_pictures

QUESTION = "Describe this picture."
QUESTION_FOR_SEVERAL = "Describe these pictures."


def add_to(subcommands: Subcommands) -> None:
    """Add `describe` to the command."""
    parser = subcommands.add("describe", run, "Say what is in one or more pictures; needs a model that sees.")
    parser.add_argument(
        "files", nargs="+", type=named_path, metavar="FILE", help="PNG, JPEG, WEBP, GIF (its first frame), BMP or TIFF"
    )
    question = f"what to say of them; default: {QUESTION!r}"
    parser.add_argument("--question", metavar="Q", help=question)
    add_pixels(parser)
    add_request_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the question about the images; returns the exit status."""
    options = checked_options(args)
    pictures = read_pictures(args.files)
    question = args.question or (QUESTION if len(pictures) == 1 else QUESTION_FOR_SEVERAL)
    stop = Stop()
    with stop.listening(), opened(args, load_config(args.config)) as model:
        system = [Message("system", args.system)] if args.system else []
        turn = Message.with_parts("user", *pictures, question)
        request = Request(messages=(*system, turn), pixels=args.pixels, **options).validated()
        images = picture_documents(model, args.files, pictures, args.pixels)
        result = run_request(model, request, stop, quiet=args.json)[0]
    if args.json:
        write_json(document(result) | {"images": images})
    return INTERRUPTED if stop.asked else SUCCESS if answered(result) else FAILURE
