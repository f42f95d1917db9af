"""Alternates writing and drawing in a running ComfyUI whose memory is too small for both, and records who holds memory
at each step.

    python -m onedesk.lab.alternate http://127.0.0.1:8188 --cycles 50 [--json] [--rows FILE]

ComfyUI must have this pack and the nodes of tests/comfyui_pack (its TestMemory reports bytes). Start it with
--reserve-vram, so that its card cannot hold language model and image model at once. Each cycle is one workflow with a
new seed: the generated text is encoded, drawn and saved. Exit 1 if a workflow failed, or if in some cycle one side did
not get the other's memory through ComfyUI's list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from ..service.console import columns, failure, write_json
from ..service.errors import OnedeskError, PeerError, RequestError
from ..service.memory.budget import GIB, MIB
from ..service.setup.comfyui import Client

REPORT = "TestMemory"
ENCODER_NODE = "TestTextEncoder"
# ComfyUI's name for our entry in its list of loaded models; every other entry is its own.
OUR_ENTRY = "OnedeskModel"
WRITTEN, DRAWN = "written", "drawn"
WORKFLOW_SECONDS = 120.0
SAMPLE_SECONDS = 0.05
# A release of less than this share of the requested bytes counts as a failure, as in the pool's own warning.
RETURNED_SHARE = 0.98
TITLES = ("AFTER", "FIGURE", "MIN", "MEDIAN", "MAX")


@dataclass(frozen=True, slots=True)
class WorkflowChoice:
    """The models of the workflow, by the names that ComfyUI offers; `tokens` to generate, `context` to reserve."""

    writer: str
    painter: str
    encoder: str
    coder: str
    tokens: int = 16
    context: int = 1024


@dataclass(slots=True)
class AlternateOutcome:
    """The outcome: one row per cycle and step, and every broken promise."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    cycles: int = 0
    # Gets each row as a line of JSON at once, so that an interrupted run has still shown results.
    sink: TextIO | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Record one row."""
        self.rows.append(row)
        if self.sink is not None:
            self.sink.write(json.dumps(row) + "\n")
            self.sink.flush()


def workflow(choice: WorkflowChoice, seed: int) -> dict[str, dict[str, Any]]:
    """One cycle in ComfyUI's API format: write, report, encode, draw, report, decode, save."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    draw = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return {
        "load": node(
            "OnedeskLoadModel", model=choice.writer, weights="as stored", context=choice.context, policy="stay"
        ),
        "messages": node("OnedeskPrompt", preset="none", system="", text="Describe a picture.", dynamic=False, seed=0),
        "write": node(
            "OnedeskGenerate", model=["load", 0], messages=["messages", 0], seed=seed, max_tokens=choice.tokens
        ),
        WRITTEN: node(REPORT, value=["write", 0]),
        "encoder": node(ENCODER_NODE, clip_name=choice.encoder),
        "encode": node("CLIPTextEncode", text=[WRITTEN, 0], clip=["encoder", 0]),
        "painter": node("UNETLoader", unet_name=choice.painter, weight_dtype="default"),
        "empty": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
        "draw": node(
            "KSampler",
            model=["painter", 0],
            positive=["encode", 0],
            negative=["encode", 0],
            latent_image=["empty", 0],
            seed=seed,
            **draw,
        ),
        DRAWN: node(REPORT, value=["draw", 0]),
        "coder": node("VAELoader", vae_name=choice.coder),
        "decode": node("VAEDecode", samples=[DRAWN, 0], vae=["coder", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="alternate"),
    }


class CardPeak(threading.Thread):
    """Asks ComfyUI every 50 ms how much of the card all processes use; `peak` in bytes, None without a card."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="onedesk-peak", daemon=True)
        self.peak: int | None = None
        self._client = client
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            try:
                card = self._client.ask("/system_stats")["devices"][0]
            except PeerError:
                continue  # busy or gone: the workflow itself reports it
            if card["type"] != "cpu":
                self.peak = max(self.peak or 0, card["vram_total"] - card["vram_free"] + card["torch_vram_free"])

    def stop(self) -> None:
        self._done.set()
        self.join()


def alternate(client: Client, choice: WorkflowChoice, cycles: int, outcome: AlternateOutcome) -> None:
    """Run one warm-up cycle, then `cycles` that count; all observations go into `outcome`, even before an error.

    Raises PeerError when ComfyUI lacks a node, refuses or fails a workflow, or does not respond.
    """
    for name in (REPORT, ENCODER_NODE, "OnedeskGenerate"):
        if name not in client.ask(f"/object_info/{name}"):
            raise PeerError(
                f"this ComfyUI has no node {name}; put the pack and its tests/comfyui_pack into custom_nodes and start"
                " it again"
            )
    first_seed = time.time_ns() % (1 << 32)
    before: dict[str, Any] | None = None
    for cycle in range(cycles + 1):
        begun = time.time()
        written, drawn = _one(client, workflow(choice, first_seed + cycle))
        if before is not None:
            outcome.failures += [f"cycle {cycle}: {words}" for words in broken_promises(before, written, drawn)]
            outcome.add(_row(cycle, WRITTEN, written, begun))
            outcome.add(_row(cycle, DRAWN, drawn, written["time"]))
            outcome.cycles = cycle
        before = drawn


def _one(client: Client, prompt: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    entry = client.wait(client.queue(prompt), timeout=WORKFLOW_SECONDS)
    status = entry["status"]
    if status["status_str"] != "success":
        reasons = [data.get("exception_message", "") for kind, data in status["messages"] if kind == "execution_error"]
        raise PeerError(f"a workflow failed: {' '.join(reasons).strip() or status['status_str']}")
    written, drawn = (json.loads(entry["outputs"][name]["text"][0]) for name in (WRITTEN, DRAWN))
    return written, drawn


def painters(report: Mapping[str, Any]) -> int:
    """Bytes that ComfyUI's own models hold, from its list."""
    return sum(model["loaded"] for model in report["core"] if model["name"] != OUR_ENTRY)


def broken_promises(before: Mapping[str, Any], written: Mapping[str, Any], drawn: Mapping[str, Any]) -> Iterator[str]:
    """The promises that one cycle broke, given the report at the end of the previous cycle and its own two."""
    if not written["ours"]:
        yield "the writer holds nothing after writing"
    if painters(written) >= painters(before):
        yield (
            f"writing took no room from ComfyUI's models, which hold {painters(written)} bytes and held"
            f" {painters(before)}"
        )
    if drawn["ours"]:
        yield f"the writer still holds {drawn['ours']} bytes after drawing"
    if drawn["evictions"] <= written["evictions"]:
        yield "ComfyUI did not ask the writer for its room while drawing"
    asked, measured = _given(drawn, "asked"), _given(drawn, "measured")
    if measured < RETURNED_SHARE * asked:
        yield f"the writer gave back {measured} of {asked} bytes"


def _given(report: Mapping[str, Any], key: str) -> float:
    return sum(item[key] for item in report["given"])


def _row(cycle: int, step: str, report: Mapping[str, Any], since: float) -> dict[str, Any]:
    row: dict[str, Any] = {"cycle": cycle, "step": step, "seconds": report["time"] - since}
    row |= {key: report[key] for key in ("used", "allocated", "reserved") if key in report}
    row |= {"comfyui": painters(report), "ours": report["ours"]}
    if step == DRAWN:
        row |= {
            "asked": _given(report, "asked"),
            "measured": _given(report, "measured"),
            "release_seconds": _given(report, "seconds"),
        }
    return row


def spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Lowest, median and highest of every figure, by step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for step in (WRITTEN, DRAWN):
        chosen = [row for row in rows if row["step"] == step]
        names = [name for name in (chosen[0] if chosen else {}) if name not in ("cycle", "step")]
        values = {name: [row[name] for row in chosen] for name in names}
        found[step] = {
            name: {"min": min(v), "median": statistics.median(v), "max": max(v)} for name, v in values.items()
        }
    return found


def drift(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Bytes of the card in use after the last drawing minus those after the first third of the cycles; None without a
    card.
    """
    used = [row["used"] for row in rows if row["step"] == DRAWN and "used" in row]
    return used[-1] - used[len(used) // 3] if used else None


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    lines: list[tuple[str, ...]] = [TITLES]
    for step, figures in document["steps"].items():
        lines += [
            (step, name, *(_shown(name, values[key]) for key in ("min", "median", "max")))
            for name, values in figures.items()
        ]
    kept = f"{len(document['failures'])} promises broken" if document["failures"] else "every promise kept"
    peak = (
        "" if document["peak_used"] is None else f", at most {document['peak_used'] / GIB:.2f} GiB of the card in use"
    )
    grown = (
        ""
        if document["drift_bytes"] is None
        else f"; {document['drift_bytes'] / MIB:.1f} MiB more than after the first third"
    )
    head = f"{document['cycles']} cycles on {document['device']} in {document['seconds']:.0f} s, {kept}{peak}{grown}"
    return "\n".join([head, columns(lines), *document["failures"]])


def _shown(name: str, value: float) -> str:
    return f"{value:.3f} s" if "seconds" in name else f"{value / GIB:.3f} GiB"


def measure(port: int, choice: WorkflowChoice, cycles: int, sink: TextIO | None = None) -> dict[str, Any]:
    """The document: the machine, `steps`, `rows`, `failures`, `peak_used`, `drift_bytes`. Bytes are integers, times
    seconds.

    `sink` gets each row at once, see AlternateOutcome. Raises PeerError if nothing responds at the port.
    """
    client = Client(port)
    stats = client.ask("/system_stats")
    outcome, watch, started = AlternateOutcome(sink=sink), CardPeak(client), time.perf_counter()
    watch.start()
    try:
        alternate(client, choice, cycles, outcome)
    except PeerError as error:
        outcome.failures.append(f"after {outcome.cycles} cycles: {error}")
    except KeyboardInterrupt:
        outcome.failures.append(f"interrupted after {outcome.cycles} cycles")
    finally:
        watch.stop()
    return {
        "kind": "alternate",
        "device": stats["devices"][0]["name"],
        "comfyui": stats["system"]["comfyui_version"],
        "torch": stats["system"]["pytorch_version"],
        "arguments": [argument for argument in stats["system"]["argv"][1:] if "/" not in argument],
        "cycles": outcome.cycles,
        "seconds": time.perf_counter() - started,
        "peak_used": watch.peak,
        "drift_bytes": drift(outcome.rows),
        "failures": outcome.failures,
        "steps": spread(outcome.rows),
        "rows": outcome.rows,
    }


def port_of(url: str) -> int:
    """The port of a URL of this machine. Raises RequestError for any other."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or parts.hostname != "127.0.0.1" or port is None:
        raise RequestError(f"the address is {url!r}; give a ComfyUI of this machine, such as http://127.0.0.1:8188")
    return port


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="alternate", description="write and draw in turn in a running ComfyUI, and report bytes by step"
    )
    parser.add_argument("url", help="http://127.0.0.1:PORT of a ComfyUI with this pack and tests/comfyui_pack")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--writer", default="big-writer", help="a language model")
    parser.add_argument("--painter", default="big_painter.safetensors", help="a diffusion model")
    parser.add_argument("--encoder", default="tiny_encoder.safetensors", help="a text encoder for TestTextEncoder")
    parser.add_argument("--coder", default="tiny_coder.safetensors", help="a VAE")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", action="store_true", help="one document on stdout, the table on stderr")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="write each row as a line of JSON to FILE as soon as it is there"
    )
    args = parser.parse_args(argv)
    if args.cycles < 1:
        parser.error(f"--cycles is {args.cycles}; use a whole number from 1")
    try:
        choice = WorkflowChoice(args.writer, args.painter, args.encoder, args.coder, args.tokens, args.context)
        with args.rows.open("w") if args.rows else contextlib.nullcontext() as sink:
            document = measure(port_of(args.url), choice, args.cycles, sink)
    except OnedeskError as error:
        if args.json:
            write_json(failure(error))
        sys.stderr.write(f"alternate: {error}\n")
        return 1
    (sys.stderr if args.json else sys.stdout).write(table(document) + "\n")
    if args.json:
        write_json(document)
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
