"""`onedesk chat`: talk with a model; the conversation is kept until /reset."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any

from ..config import load_config
from ..console import Stop, read_line
from ..core import Message, Request
from ..errors import Cancelled, RequestError
from .model_options import add_request_options, checked_options, opened
from .options import SUCCESS, Subcommands
from .output import run_request

if TYPE_CHECKING:
    from ..api import OpenModel

_COMMAND = re.compile("/[A-Za-z]+")


def add_to(subcommands: Subcommands) -> None:
    """Add `chat` to the command."""
    add_request_options(
        subcommands.add("chat", run, "Talk with a model; the conversation is kept until /reset.", json=False)
    )


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of standard input; returns the exit status."""
    options = checked_options(args)
    start = [Message("system", args.system)] if args.system else []
    history = list(start)
    stop = Stop()
    with stop.listening(), opened(args, load_config(args.config)) as model:
        if stop.asked:
            raise Cancelled("interrupted")
        print("Write a message. /reset clears the conversation, /exit or Ctrl-D ends it.", file=sys.stderr)
        while (line := read_line("> ")) is not None and line.strip() != "/exit":
            word = line.strip()
            if word == "/reset":
                history = list(start)
                print("(The conversation is cleared.)", file=sys.stderr)
            elif _COMMAND.fullmatch(word):
                print(f"onedesk: {word} is not a command; use /reset or /exit", file=sys.stderr)
            elif word:
                history = _turn(model, options, [*history, Message("user", line)], stop)
    return SUCCESS


def _turn(model: OpenModel, options: dict[str, Any], history: list[Message], stop: Stop) -> list[Message]:
    """Answer the last message; returns the history for the next turn, without an unanswered message."""
    stop.asked = False
    try:
        result = run_request(model, Request(messages=tuple(history), **options).validated(), stop, quiet=False)[0]
    except RequestError as error:
        print(f"onedesk: {error} (/reset clears the conversation)", file=sys.stderr)
        return history[:-1]
    return [*history, Message("assistant", result.text, result.reasoning)] if result.text.strip() else history[:-1]
