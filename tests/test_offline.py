"""The command, the service and their children contact no other machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bound import bound
from command_line import ENDS_WITHIN, start
from outside import Outside, build_outside
from serving import MODEL, Server, write_tree

# Three ways out, each from a grandchild without Python's environment variables. 192.0.2.0/24 is reserved for
# documentation.
REACHING = """
import socket, subprocess, sys
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, "-I", "-S", "-c", sys.orig_argv[-1], "child"]).returncode)
for reach in (
    lambda: socket.create_connection(("192.0.2.1", 443), 1),
    lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("192.0.2.2", 53)),
    lambda: socket.getaddrinfo("onedesk.invalid", 443),
):
    try:
        reach()
    except OSError:
        continue
    sys.exit("it got out")
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
    sys.exit(0)
"""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    """Every process started during the fixture is watched."""
    made = build_outside(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(made.library))
        yield made


def test_a_child_of_a_child_that_reaches_out_is_refused_and_recorded(outside: Outside) -> None:
    subprocess.run(bound([sys.executable, "-I", "-S", "-c", REACHING]), check=True, timeout=ENDS_WITHIN)
    assert outside.asked() == ["connect 192.0.2.1", "sendto 192.0.2.2", "getaddrinfo onedesk.invalid"]


def test_a_written_and_a_served_answer_reach_for_no_other_machine(outside: Outside, tmp_path: Path) -> None:
    server = Server(write_tree(tmp_path / "tree")).begin()
    try:
        child = start(server.tree, "generate", "a red cat", "--model", MODEL, "--max-tokens", "4")
        out, err = child.communicate(timeout=ENDS_WITHIN)
        assert child.returncode == 0, err
        assert out.strip()
        server.wait()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a cat"}], "max_tokens": 4}
        assert server.ask("POST", "/v1/chat/completions", chat)[0] == 200
        assert server.process is not None
        assert outside.library.name in Path(f"/proc/{server.process.pid}/maps").read_text()
    finally:
        assert server.stop() == 0
    assert outside.asked() == []


def test_only_the_hub_has_a_client_for_other_hosts():
    """Nodes and service may contact servers that the user named (peers) and ComfyUI on this machine (setup), and no
    other host.
    """
    root = Path(__file__).resolve().parents[1]
    found = {
        path.relative_to(root).as_posix()
        for folder in ("service", "nodes")
        for path in (root / folder).rglob("*.py")
        if re.search(
            r"ClientSession|urlopen|http\.client|build_opener|\bimport requests|\bimport httpx",
            path.read_text(encoding="utf-8"),
        )
    }
    allowed = ("service/hub/", "service/peers/", "service/setup/comfyui.py")
    assert "service/hub/web.py" in found
    assert [path for path in sorted(found) if not path.startswith(allowed)] == []
    for path in (root / "service").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        inside = path.is_relative_to(root / "service" / "hub")
        assert inside or "ClientSession" not in text, path
        uses_hub = re.search(r"from \.+hub\.(?:web|hubs|fetch|transfer|huggingface|modelscope)\b", text)
        assert inside or not uses_hub or path.name in ("pull.py", "check_hub.py"), path
