"""Speaks as much of llama-server and vLLM as an engine must, and shows the faults that real ones cannot be made to
show.

python fake_engine.py FAULT [MIB] ARGUMENTS OF THE ENGINE...
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULT, MIB, WORDS = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def word(*names: str, default: str = "") -> str:
    return next((WORDS[at + 1] for at, given in enumerate(WORDS[:-1]) if given in names), default)


PORT = int(word("--port", default="0"))
PRESET = configparser.ConfigParser()
PRESET.read_string("[DEFAULT]\n" + Path(word("--models-preset", default=os.devnull)).read_text())
NAMES = PRESET.sections() or [word("--alias", "--served-model-name")]
LOADED: list[str] = []  # of several models, the latest last
KEY_FILE = word("--api-key-file")
KEY = Path(KEY_FILE).read_text().strip() if KEY_FILE else os.environ.get("VLLM_API_KEY", "")
BALLAST: list[bytearray] = []
ASLEEP = threading.Event()


def load() -> None:
    ballast = bytearray(MIB << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    BALLAST[:] = [ballast]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/health":
            return self.answer(503 if FAULT == "loads-for-ever" else 200, {"status": "ok"})
        if not self.allowed():
            return self.answer(401, {"error": {"message": "no key"}})
        names = ["another"] if FAULT == "another-model" else NAMES
        return self.answer(
            200, {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": 77} for name in names]}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if self.path.startswith("/sleep"):
            BALLAST.clear()
            ASLEEP.set()
            return self.answer(500 if FAULT == "sleepless" else 200, {"status": "sleeping"})
        if self.path == "/wake_up":
            load()
            ASLEEP.clear()
            return self.answer(200, {"status": "awake"})
        if not self.allowed():
            return self.answer(401, {"error": {"message": "no key"}})
        if PRESET.sections():
            self.route(body["model"])
        return self.stream(body)

    def route(self, name: str) -> None:
        """As a router: load what is asked for, and let the one go that was used the longest time ago."""
        if name in LOADED:
            LOADED.remove(name)
        LOADED.append(name)
        del LOADED[: -int(word("--models-max"))]
        print("loaded:", *LOADED, file=sys.stderr, flush=True)

    def stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        told = [f"{name} with {PRESET[name]['model']}" for name in PRESET.sections() if name == body["model"]]
        for at, text in enumerate(told or ["a ", "cat ", "on ", "a ", "mat"]):
            if FAULT == "dies-while-writing" and at == 2:
                sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
                os.kill(os.getpid(), signal.SIGKILL)
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            self.send(head | {"choices": [choice]})
            time.sleep(0.05 if FAULT == "slow" else 0)
        self.send(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.send(head | {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, document: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
        self.wfile.flush()

    def answer(self, status: int, document: dict[str, Any]) -> None:
        raw = b"<html>" if FAULT == "no-json" and self.path != "/health" else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {KEY}"


def main() -> None:
    if "--help" in WORDS:
        print(
            "usage: --port N"
            + ("" if FAULT == "old" else " --sleep-idle-seconds N --load-mode MODE --models-preset PATH")
        )
        return
    print(f"starting with key {KEY}", file=sys.stderr, flush=True)
    if FAULT == "dies":
        sys.exit("cannot load: the file is not a model")
    if FAULT == "hangs":
        time.sleep(600)
    if FAULT in ("stays", "leaves-a-child"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if FAULT == "leaves-a-child":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        grandchild = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
        print(f"grandchild {grandchild.pid}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if FAULT == "no-http":
        import socket

        with socket.create_server(("127.0.0.1", PORT)) as server:
            while True:
                made, _ = server.accept()
                made.sendall(b"\x00\x01garbage\r\n")
                made.close()
    load()
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()


main()
