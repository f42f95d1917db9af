"""`onedesk serve`: its options, and the service's lifetime."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Config, load_config, own_version
from ..console import UsageError
from ..core import ModelSpec
from ..tree_names import FILE_NAME
from .options import Subcommands, named_path, whole_from

if TYPE_CHECKING:
    from ..peers.note import Note
    from ..server.app import ListenAddress
    from ..server.models import ServedModels
    from ..server.service import Service

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0  # to close models and engines after everything that uses them has ended
# Seconds after which a thread passes the interpreter lock on. Python's default of 5 ms is two tokens of a GPU.
TURN = 0.0005


def add_to(subcommands: Subcommands) -> None:
    """Add `serve` to the command."""
    text = "Answer over HTTP as OpenAI's API does (--model: names; repeatable)."
    parser = subcommands.add("serve", serve, text, json=False, model="append")
    parser.add_argument("--host", metavar="ADDRESS", help="where to listen; default 127.0.0.1, or host in [service]")
    parser.add_argument(
        "--port", type=whole_from(0), metavar="N", help="0: any free port; default 8787, or port in [service]"
    )
    parser.add_argument("--uds", type=named_path, metavar="PATH", help="listen on a unix socket instead")
    where = "the token's file, made if absent; default: in the tree's cache"
    parser.add_argument("--token-file", type=named_path, metavar="FILE", help=where)
    parser.add_argument("--no-token", action="store_true", help="ask for no token; on loopback or a unix socket only")
    roots = "serve the models of this folder too, before others"
    parser.add_argument("--roots", type=named_path, action="append", metavar="FOLDER", help=roots)
    parser.add_argument(
        "--on-demand", action="store_true", help="end after a time without requests, see linger in [service]"
    )


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A service before it is created, with everything checked."""

    config: Config
    address: ListenAddress
    served: ServedModels
    token: str | None
    token_file: Path | None
    version: str
    on_demand: bool


def serve(args: argparse.Namespace) -> int:
    """Run the service until SIGTERM or SIGINT; returns 0."""
    from ..peers.note import only_one
    from ..server.safe_log import make_log_safe

    plan = _plan(args)
    sys.setswitchinterval(TURN)
    make_log_safe(plan.token)
    with only_one(plan.config.cache):
        ended = asyncio.run(_run(plan))
    if not ended:
        # A thread is in work that cannot be stopped, and Python would wait for it. All state is saved, and child
        # processes end with this one.
        log.warning("some work did not end in time; the service ends without it")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _plan(args: argparse.Namespace) -> ServePlan:
    """Check the command line and the settings, and create the token's file. Raises UsageError, FileError, ModelError,
    RequestError.
    """
    from ..catalog.inventory import model_roots
    from ..peers.token_file import FILE_NAME as TOKEN_FILE_NAME
    from ..peers.token_file import load_token
    from ..server.app import ListenAddress
    from ..server.guard import is_loopback
    from ..server.models import ServedModels

    config = load_config(args.config)
    config = replace(config, model_roots=tuple(dict.fromkeys([*(args.roots or ()), *config.model_roots])))
    for root in config.model_roots:
        if not (root.is_dir() and os.access(root, os.R_OK | os.X_OK)):
            named = (
                "--roots"
                if root in (args.roots or ())
                else f"roots under [models] in {config.file.name if config.file else FILE_NAME}"
            )
            log.warning(
                "the model folder %s cannot be read, so none of its models is served; make it, or correct %s",
                root,
                named,
            )
    host = config.service.host if args.host is None else args.host
    port = config.service.port if args.port is None else args.port
    if port > 65535:
        raise UsageError(f"--port is {port}; use 0 to 65535")
    if args.uds is not None and (args.host is not None or args.port is not None):
        raise UsageError("--uds goes without --host and --port; give one or the other")
    if args.no_token and args.token_file is not None:
        raise UsageError("--no-token and --token-file exclude each other; give one of them")
    if args.no_token and args.uds is None and not is_loopback(host):
        raise UsageError(
            f"--no-token works on loopback only, and {host} can be reached by other machines; leave it out"
        )
    names = tuple(dict.fromkeys(args.model or ()))
    roots = model_roots(config)
    for name in names:
        roots.resolve(name)
    token_file = None if args.no_token else (args.token_file or config.cache / TOKEN_FILE_NAME)
    return ServePlan(
        config=config,
        address=ListenAddress(host, port, args.uds),
        served=ServedModels(names, ModelSpec("", args.context, args.quant, args.device)),
        token=None if token_file is None else load_token(token_file),
        token_file=token_file,
        version=own_version(),
        on_demand=args.on_demand,
    )


async def _run(plan: ServePlan) -> bool:
    """Serve until a signal; returns whether every thread has ended."""
    from ..peers.note import noted
    from ..registry import REGISTRY
    from ..server.app import listen, make_app
    from ..server.guard import Guard, own_names
    from ..server.maintenance import renew_when_idle
    from ..server.models import Models
    from ..server.service import Service
    from ..server.tasks import in_daemon
    from ..server.unix_socket import remove_socket
    from ..server.unused import end_when_unused

    REGISTRY.configure(plan.config)
    service = Service(plan.config.service, Models(plan.config, REGISTRY, plan.served), REGISTRY, plan.version)
    guard = Guard(plan.token, None if plan.address.uds is not None else own_names(plan.address.host))
    stopped = _listen_for_signals(service)
    ended = False
    try:
        runner, address = await listen(make_app(service, guard), plan.address, plan.config.cache)
        try:
            note = _note(plan, address)
            with noted(plan.config.cache, note):
                service.start("the first load", lambda: service.warm_up(plan.served.names))
                service.start("the renewal of models", lambda: renew_when_idle(service))
                if plan.on_demand:
                    service.start("the look whether it is used", lambda: end_when_unused(service, stopped))
                _say(note)
                await stopped.wait()
                await service.stop(plan.config.service.grace)
        finally:
            await runner.cleanup()
            if address.uds is not None:
                remove_socket(plan.config.cache)
    finally:
        ended = await service.close()
        ended = await in_daemon(REGISTRY.close, CLOSE_SECONDS) and ended
    return ended


def _listen_for_signals(service: Service) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets. A second signal stops running work at once."""
    stopped = asyncio.Event()

    def asked() -> None:
        if stopped.is_set():
            service.stop_now()
        stopped.set()

    for kind in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(kind, asked)
    return stopped


def _note(plan: ServePlan, address: ListenAddress) -> Note:
    from ..peers.note import Note

    token_file = None if plan.token_file is None else str(plan.token_file.absolute())
    if address.uds is not None:
        return Note(os.getpid(), plan.version, None, None, str(address.uds.absolute()), token_file)
    return Note(os.getpid(), plan.version, address.host, address.port, None, token_file)


def _say(note: Note) -> None:
    """Report the address and the token's file, never the token itself."""
    token = "it asks for no token" if note.token_file is None else f"its token is in {note.token_file}"
    sys.stderr.write(f"onedesk: serving at {note.where}; {token}\n")
    sys.stderr.flush()
