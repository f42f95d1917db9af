"""`onedesk pull`: fetch a model from a hub into the models folder, or verify fetched files."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Config, load_config
from ..console import UsageError, write_json, write_text
from ..errors import Cancelled, ModelError, OnedeskError, RequestError
from .options import SUCCESS, Subcommands, named_path
from .pull_report import Reporter, plan_text, size

if TYPE_CHECKING:
    from ..hub.limits import HubLimits
    from ..hub.plan import Fit, PullPlan
    from ..hub.planner import PullRequest


def add_to(subcommands: Subcommands) -> None:
    """Add `pull` to the command."""
    parser = subcommands.add("pull", run, "Fetch a model from Hugging Face, ModelScope or a mirror.")
    words = "OWNER/NAME, a Qwen model's short name, or the address of a page or file on a hub; "
    words += "image models for ComfyUI: z-image-turbo, flux2-klein-4b, qwen-image"
    parser.add_argument("name", metavar="NAME|URL", help=words)
    words = "hf, modelscope, or the address of a mirror that speaks Hugging Face's protocol; default: order in [hub]"
    parser.add_argument("--from", dest="source", metavar="HUB|URL", help=words)
    parser.add_argument(
        "--revision", metavar="R", help="a branch, tag or commit; default: the newest of the main branch"
    )
    parser.add_argument(
        "--form", metavar="F", help="among several forms in one repository: bf16, fp8, ...; default: the plain one"
    )
    words = "fetch the files that match instead of the usual choice; repeatable; files that can run code are refused"
    parser.add_argument("--files", action="append", default=[], metavar="GLOB", help=words)
    parser.add_argument(
        "--as", dest="folder", metavar="NAME", help="the folder below models; default: the repository's name"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be fetched, and whether it fits; fetch nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="hash every file of a pulled model again; connects to nothing"
    )
    words = "take files from this folder where their hashes agree: a hub client's cache, ComfyUI's models, any copy"
    parser.add_argument("--import", dest="local", type=named_path, metavar="PATH", help=words)


def run(args: argparse.Namespace) -> int:
    """Run the pull or the check; returns the exit status. Raises UsageError, OnedeskError."""
    from ..hub.image_models import find_image_model, read_image_models
    from ..hub.names import parse_name

    if args.model is not None or args.quant != "none":
        raise UsageError("pull takes the model as NAME, and its files as they are: leave --model and --quant out")
    config = load_config(args.config)
    if args.verify:
        return _verify(args, config)
    if find_image_model(args.name, read_image_models()) is None:
        try:
            parse_name(args.name)
        except RequestError as error:
            raise UsageError(f"{error}; image models are {', '.join(read_image_models())}") from error
    return asyncio.run(_Command(args, config).run())


class _Command:
    """One pull, from its plan to its last event."""

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self._args = args
        self._config = config
        self._stop = False
        self._reporter = Reporter(as_json=args.json and not args.dry_run)

    async def run(self) -> int:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for kind in signals:
            loop.add_signal_handler(kind, self._interrupt, task)
        try:
            return await self._pull()
        except asyncio.CancelledError as error:
            self._reporter.end()
            print(f"onedesk: what has arrived is kept; continue with: {command_of(self._args)}", file=sys.stderr)
            raise Cancelled("interrupted") from error
        finally:
            self._reporter.end()
            for kind in signals:
                loop.remove_signal_handler(kind)

    def _interrupt(self, task: asyncio.Task[Any] | None) -> None:
        self._stop = True
        if task is not None:
            task.cancel()

    async def _pull(self) -> int:
        from ..hub.fetch import Fetch
        from ..hub.hubs import Hubs
        from ..hub.local_files import LocalFiles
        from ..hub.planner import Planner

        limits, report, stop = limits_of(self._config), self._reporter, lambda: self._stop
        local = None if self._args.local is None else await asyncio.to_thread(LocalFiles, self._args.local, stop)
        verdict = make_verdict(self._config, self._args.context, self._args.device)
        async with Hubs(limits, report, os.environ, local) as hubs:
            plan = await Planner(request_of(self._args), self._config, hubs, verdict, report, stop).plan()
            if self._args.dry_run:
                write_json(plan.document()) if self._args.json else write_text(plan_text(plan))
                return SUCCESS
            self._show(plan)
            done = await Fetch(plan, hubs, limits, report, stop).run()
        self._finish(plan, done)
        return SUCCESS

    def _show(self, plan: PullPlan) -> None:
        if self._args.json:
            self._reporter({"event": "plan", **plan.document()})
        else:
            write_text(plan_text(plan))

    def _finish(self, plan: PullPlan, done: dict[str, Any]) -> None:
        self._reporter.end()
        rows = [
            row
            for folder in plan.folders
            if folder.manifest == "onedesk.json"
            for row in _rows(self._config, folder.root)
        ]
        if self._args.json:
            self._reporter(
                done | {"models": [{key: row[key] for key in ("name", "opens", "fits", "reason")} for row in rows]}
            )
            return
        write_text(
            f"{plan.name} is complete: {size(done['bytes'])} in {done['folder']}, {size(done['fetched'])} of it"
            " fetched now"
        )
        for row in rows:
            write_text(
                f"{row['name']}: {row['reason']}"
                + (f'\n  onedesk generate --model {shlex.quote(row["name"])} "..."' if row["opens"] else "")
            )


def _rows(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The rows of `onedesk models` for a folder, which say whether its tensors match its config."""
    from ..catalog.inventory import model_rows

    try:
        return model_rows(config, str(folder), device="auto", context=None)
    except OnedeskError:
        return []  # single files that are not a model by themselves


def limits_of(config: Config) -> HubLimits:
    """The settings of [hub] that concern the network."""
    from ..hub.limits import HubLimits

    hub = config.hub
    waited = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")
    stall = float(waited) if waited.isdigit() and 0 < int(waited) <= 3600 else hub.stall
    return HubLimits(connections=hub.connections, rate=hub.limit_mb_per_s * 1e6, stall=stall)


def request_of(args: argparse.Namespace) -> PullRequest:
    """The request of the command line."""
    from ..hub.planner import PullRequest

    return PullRequest(args.name, args.source, args.revision, args.form, tuple(args.files), args.folder)


def command_of(args: argparse.Namespace) -> str:
    """A command that continues this pull, to be copied."""
    words = ["onedesk", "pull", args.name]
    for option, value in (
        ("--from", args.source),
        ("--revision", args.revision),
        ("--form", args.form),
        ("--as", args.folder),
    ):
        words += [option, value] if value else []
    for glob in args.files:
        words += ["--files", glob]
    words += ["--import", str(args.local)] if args.local else []
    words += ["--config", str(args.config)] if args.config else []
    return shlex.join(words)


def make_verdict(config: Config, context: int | None, device: str) -> Callable[[str, dict[str, Any] | None, int], Fit]:
    """Turns the plan of `onedesk doctor --plan` into a verdict on the model about to be fetched."""

    def verdict(name: str, described: dict[str, Any] | None, images: int) -> Fit:
        from ..catalog.plan import plan_model
        from ..hub.plan import Fit

        if not name:
            return _images_alone(config, images, device)
        with tempfile.TemporaryDirectory() as scratch:
            asked = name
            if described is not None:
                folder = Path(scratch, name.rsplit("/", 1)[-1])
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
                asked = str(folder)
            try:
                planned = plan_model(
                    asked, replace(config, default_model=None), images=images or None, context=context, device=device
                )
            except RequestError as error:
                return Fit(False, str(error))
            except ModelError as error:
                raise ModelError(
                    f"{name} is not fetched: {error}; --files GLOB fetches single files all the same"
                ) from error
        return _judged(name, planned)

    return verdict


def _images_alone(config: Config, images: int, device: str) -> Fit:
    """Whether image models fit without the language model. ComfyUI may load them one after the other, so this is the
    conservative answer.
    """
    from ..api import pick_device
    from ..hub.plan import Fit
    from ..memory.budget import MemorySettings, show
    from ..memory.truth import read_truth

    values: dict[str, Any] = dict(config.memory)
    room = read_truth(pick_device(device).type).available - MemorySettings(**values).floor
    verb = "fits" if images <= room else "does not fit at once"
    return Fit(images <= room, f"{verb}: {show(images)} of weights, {show(max(0, room))} available")


def _judged(name: str, planned: dict[str, Any]) -> Fit:
    from ..hub.plan import Fit

    rows = [row for row in planned["forms"] if row["engine"] == "onedesk" and row["opens"]]
    if not rows:
        raise ModelError(
            f"{name} is not fetched: {planned['forms'][0]['why']}; --files GLOB fetches single files all the same"
        )
    fitting = [row for row in rows if row["fits"]]
    if not fitting:
        return Fit(False, f"does not fit this machine in any form; {rows[-1]['format']}: {rows[-1]['why']}")
    if fitting[0] is rows[0]:
        return Fit(True, f"fits as it is ({rows[0]['format']}), with {rows[0]['context']:,} tokens: {rows[0]['why']}")
    return Fit(
        True,
        f"does not fit as it is, but as {fitting[0]['format']} with {fitting[0]['context']:,} tokens:"
        f" {fitting[0]['why']}",
    )


def _verify(args: argparse.Namespace, config: Config) -> int:
    from ..console import Stop
    from ..hub.manifest import verify
    from ..hub.planner import pulled_folder

    given = [name for name in ("source", "revision", "form", "files", "dry_run", "local") if getattr(args, name)]
    if given:
        raise UsageError("--verify reads only what is there; leave all other options but --as, --json and --config out")
    folder, manifest = pulled_folder(config, args.folder or args.name)
    reporter, stop = Reporter(as_json=args.json), Stop()
    with stop.listening():
        found = verify(folder, manifest, stop, reporter)
    reporter.end()
    files = [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in found.files]
    total = sum(entry.size for entry in found.files)
    if args.json:
        reporter(
            {
                "event": "done",
                "folder": str(folder),
                "commit": found.commit,
                "files": files,
                "bytes": total,
                "fetched": 0,
            }
        )
    else:
        write_text(
            f"{args.name} is what was pulled: {len(files)} files, {size(total)}, commit {found.commit[:12]} of"
            f" {found.repo}"
        )
    return SUCCESS
