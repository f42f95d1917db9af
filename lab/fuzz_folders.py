"""Looks for files of a model folder that raise anything but an OnedeskError, or take much memory.

    python -m onedesk.lab.fuzz_folders --minutes 20 [--kinds config,tokenizer,header,template] [--seed N] [--out FOLDER]

Run it from a checkout: modules of tests/ make the changes. A finding is printed and kept in FOLDER as a model folder,
to become a test. Exit 1 if there was one. One document at the end: examples and findings per kind.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..service.api import open_model
from ..service.catalog.inventory import default_model, model_rows
from ..service.catalog.plan import plan_model
from ..service.config import Config
from ..service.console import write_json
from ..service.errors import OnedeskError
from ..service.loader.checkpoint import open_checkpoint
from ..service.loader.names import ModelRoots
from ..service.memory.budget import MemorySettings
from ..service.memory.pool import Pool
from ..service.memory.truth import read_truth
from ..service.text.template import load_template
from ..service.text.tokenizer import load_tokenizer

TESTS = Path(__file__).resolve().parents[1] / "tests"
MOST = 96 << 20  # bytes of Python's objects
SECONDS = 20.0  # time limit of one folder
ROUND = 50  # examples between two readings of the clock
TEXTS = ("", "a cat", "a" * 40 + "!", "e\u0301 \U0001f600 <|im_end|> 12345", "\x00\ufffd")
MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "a cat"}]
PIECES = (
    "{{ messages }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{% if tools %}",
    "{% endif %}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{{ 'a' * 10**9 }}",
    "{{ range(10**9) | list }}",
    "{% macro f() %}",
    "{% endmacro %}",
    "{{ f() }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}",
    "{% set x = x ~ x %}",
    "{{ messages | tojson(indent=2) }}",
    "{%- break %}",
    "{{ self }}",
    "{{ ''.__class__ }}",
    "{{ cycler.__init__ }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ namespace(a=1).a }}",
    "{#",
    "\ud800",
    "\x00",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{",
    "}}",
    "{% include 'x' %}",
    "text\n",
)


@dataclass
class Finds:
    """The findings: how many examples of each kind were tried, and what they raised."""

    examples: dict[str, int] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)


class Fuzzer:
    """Complete folders of each family, and the entry points that a changed folder is passed to."""

    def __init__(self, work: Path, out: Path) -> None:
        sys.path.insert(0, str(TESTS))
        self.faults: Any = importlib.import_module("folder_faults")
        families: Any = importlib.import_module("tiny_families")
        self.whole = {name: families.write_family(work / "whole" / name, name) for name in families.FAMILIES}
        spoken: Any = importlib.import_module("tiny_models")
        self.whole["spoken"] = spoken.write_language_model(work / "whole" / "spoken")
        self.bad, self.out = work / "roots" / "bad", out
        self.pool = Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))
        self.finds = Finds()
        self.kinds: dict[str, Callable[[random.Random], None]] = {
            "config": self.config,
            "tokenizer": self.tokenizer,
            "header": self.header,
            "template": self.template,
        }

    def put(self, source: Path, changes: dict[str, bytes]) -> None:
        """Write the changed folder."""
        shutil.rmtree(self.bad, ignore_errors=True)
        self.bad.mkdir(parents=True)
        for path in source.iterdir():
            if path.name not in changes:
                os.link(path, self.bad / path.name)
        for name, content in changes.items():
            (self.bad / name).write_bytes(content)

    def config(self, draw: random.Random) -> None:
        """Put a value of any type and size anywhere into a JSON file."""
        source = self.whole[draw.choice(sorted(self.whole))]
        name = draw.choice([name for name in self.faults.FILES if name != self.faults.TOKENIZER])
        document = self.faults.document_of(source, name)
        if name == self.faults.CONFIG and draw.random() < 0.5:
            document = document | {"quantization_config": draw.choice(self.faults.QUANTIZATIONS)}
        self.put(source, {name: self.faults.changed(document, draw)})
        config, roots = Config(model_roots=(self.bad.parent,)), ModelRoots([self.bad.parent])
        self.door(lambda: json.dumps(model_rows(config, None, device="cpu", context=None)).encode(), strict=True)
        self.door(lambda: default_model(config), strict=True)
        self.door(lambda: plan_model("bad", config, memory=64 << 30))
        cache = self.bad.parent.parent / "cache"
        self.door(
            lambda: open_model("bad", pool=self.pool, roots=roots, device="cpu", load=False, kernel_cache=cache).close()
        )
        self.door(lambda: load_template(self.bad).close())

    def tokenizer(self, draw: random.Random) -> None:
        """The same in tokenizer.json; one that still loads encodes and decodes texts."""
        source = self.whole["spoken"]
        document = self.faults.document_of(source, self.faults.TOKENIZER)
        self.put(source, {self.faults.TOKENIZER: self.faults.changed(document, draw)})

        def use() -> None:
            tokenizer = load_tokenizer(self.bad)
            for text in TEXTS:
                tokenizer.decode(tokenizer.encode(text))
            for token in (0, tokenizer.size - 1, tokenizer.size, 1 << 40):
                tokenizer.token_bytes(token)
            tokenizer.id_of("<|im_end|>")

        self.door(use)

    def header(self, draw: random.Random) -> None:
        """A header with a changed value or changed bytes; the file keeps its length or not."""
        source = self.whole[draw.choice(sorted(self.whole))]
        raw = (source / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        head, body = raw[8 : 8 + length], raw[8 + length :]
        if draw.random() < 0.6:
            head = self.faults.changed(json.loads(head), draw)
        else:
            changed = bytearray(head)
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            head = bytes(changed)
        size = len(head) if draw.random() < 0.8 else draw.choice((0, 1, len(head) + 1, 1 << 31, (1 << 64) - 1))
        self.put(
            source,
            {"model.safetensors": struct.pack("<Q", size) + head + body[: draw.choice((len(body), 0, len(body) // 2))]},
        )
        self.door(lambda: open_checkpoint(self.bad))
        config = Config(model_roots=(self.bad.parent,))
        self.door(lambda: json.dumps(model_rows(config, None, device="cpu", context=None)).encode(), strict=True)

    def template(self, draw: random.Random) -> None:
        """Any sequence of template fragments."""
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 8)))
        self.put(self.whole["spoken"], {"chat_template.jinja": text.encode("utf-8", "surrogatepass")})

        def use() -> None:
            template = load_template(self.bad)
            try:
                template.render(MESSAGES).encode()
            finally:
                template.close()

        self.door(use)

    def door(self, action: Callable[[], object], *, strict: bool = False) -> None:
        """Call an entry point and record what it raises. `strict`: an OnedeskError is a finding too."""
        tracemalloc.start()
        began = time.monotonic()
        fault = ""
        try:
            action()
        except OnedeskError as error:
            fault = f"{type(error).__name__}: {error}" if strict else _unfit(str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (anything; a panic of tokenizers is no Exception)
            fault = f"{type(error).__name__}: {error}"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds = time.monotonic() - began
        if not fault and peak > MOST:
            fault = f"took {peak >> 20} MiB of memory"
        if not fault and seconds > SECONDS:
            fault = f"took {seconds:.0f} s"
        if fault:
            self.keep(fault)

    def keep(self, fault: str) -> None:
        """Keep the folder of a finding."""
        folder = self.out / f"find-{len(self.finds.faults)}"
        shutil.copytree(self.bad, folder, dirs_exist_ok=True)
        self.finds.faults.append({"folder": str(folder), "fault": fault[:300]})
        sys.stderr.write(f"{folder}: {fault[:300]}\n")


def _unfit(message: str) -> str:
    """What is wrong with an error's message, if anything."""
    if not message or len(message) > 3000:
        return f"a message of {len(message)} characters: {message[:200]}"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"a message that cannot be printed: {message!r}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Look for model folders that raise what is no OnedeskError, or take much memory."
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kinds", default="config,tokenizer,header,template")
    parser.add_argument("--seed", type=int, default=None, help="default: another one at each run, which is printed")
    parser.add_argument("--out", type=Path, default=Path("finds"), help="where finds are kept")
    args = parser.parse_args()
    seed = time.time_ns() if args.seed is None else args.seed
    draw = random.Random(seed)  # noqa: S311 (not secret)
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as work:
        fuzzer = Fuzzer(Path(work), args.out)
        while time.monotonic() < until:
            for kind in args.kinds.split(","):
                for _ in range(ROUND if kind != "template" else ROUND // 5):
                    fuzzer.kinds[kind](draw)
                    fuzzer.finds.examples[kind] = fuzzer.finds.examples.get(kind, 0) + 1
                    if time.monotonic() >= until:
                        break
    write_json({"seed": seed, "examples": fuzzer.finds.examples, "finds": fuzzer.finds.faults})
    return 1 if fuzzer.finds.faults else 0


if __name__ == "__main__":
    sys.exit(main())
