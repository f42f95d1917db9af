"""`onedesk generate`: answer one prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config import load_config
from ..console import Stop, UsageError, read_piped_text, write_json
from ..core import BEAMS_LIMIT, CHOICES_LIMIT, Message, Request, require_user_text
from .model_options import add_request_options, checked_options, opened
from .options import FAILURE, INTERRUPTED, SUCCESS, Subcommands, switch, token_ids, whole_from
from .output import answered, document, run_request
from .pictures import add_images, picture_documents, read_pictures

NO_PROMPT = "no PROMPT and no --ids; see onedesk generate --help"


def add_to(subcommands: Subcommands) -> None:
    """Add `generate` to the command."""
    parser = subcommands.add("generate", run, "Answer one prompt.")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - or a pipe reads standard input")
    parser.add_argument(
        "--ids", type=token_ids, metavar="1,2,3", help="raw token ids instead of a prompt: no template, no tokenizer"
    )
    choices = f"choices, 1 (the default) to {CHOICES_LIMIT}, decoded as a batch; choice i has seed + i"
    parser.add_argument("--n", type=whole_from(1), default=1, metavar="N", help=choices)
    best_of = f"decode N choices, --n to {CHOICES_LIMIT}, and give the most likely --n of them"
    parser.add_argument("--best-of", type=whole_from(1), metavar="N", help=best_of)
    beams = f"beam search with N beams instead of sampling: --n to {BEAMS_LIMIT}"
    parser.add_argument("--beams", type=whole_from(1), metavar="N", help=beams)
    repetition = "stop when the output loops; default on, with --ids off"
    parser.add_argument("--repetition-stop", type=switch, metavar="on|off", help=repetition)
    add_images(parser)
    add_request_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt of the command line; returns the exit status."""
    own = {name: getattr(args, name) for name in ("repetition_stop", "n", "best_of", "beams", "pixels")}
    options = checked_options(args, **own)
    request = _request(args, options).validated()
    config = load_config(args.config)
    pictures, images = request.pictures, None
    stop = Stop()
    with stop.listening(), opened(args, config) as model:
        if pictures:
            images = picture_documents(model, args.image, pictures, args.pixels)
        results = run_request(model, request, stop, quiet=args.json)
    if args.json:
        documents = [document(result) for result in results]
        whole = documents[0] if args.n == 1 else {"choices": documents}
        write_json(whole if images is None else whole | {"images": images})
    return INTERRUPTED if stop.asked else SUCCESS if all(map(answered, results)) else FAILURE


def _request(args: argparse.Namespace, options: dict[str, Any]) -> Request:
    if args.ids is not None:
        if args.prompt is not None or args.system is not None:
            raise UsageError("--ids is the whole prompt; leave PROMPT and --system out")
        return Request(ids=args.ids, images=read_pictures(args.image), **options)
    prompt = args.prompt
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(NO_PROMPT)
    if prompt is None or prompt == "-":
        piped = read_piped_text()
        if prompt is None and not piped:
            raise UsageError(NO_PROMPT)
        prompt = piped
    system = [Message("system", args.system)] if args.system else []
    pictures = read_pictures(args.image)
    turn = Message.with_parts("user", *pictures, prompt) if pictures else Message("user", prompt)
    messages = (*system, turn)
    require_user_text(messages)
    return Request(messages=messages, **options)
