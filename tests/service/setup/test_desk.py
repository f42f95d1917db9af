"""run.sh and the demo, with the real ComfyUI in a tree whose path has spaces and quotes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from onedesk.service.cli.demo import DemoModels, run_demo
from onedesk.service.config import load_config
from onedesk.service.errors import FileError, PeerError
from onedesk.service.python_process import package_command
from onedesk.service.setup import desk
from onedesk.service.setup.comfyui import Client, free_port
from onedesk.service.setup.desk import (
    Running,
    find_running,
    main,
    parse,
    pid_file,
    start,
    status,
    stop,
)
from onedesk.service.setup.foreign import model_paths
from onedesk.service.setup.tree import Desk, Tree
from PIL import Image
from tiny_models import write_image_models, write_language_model

START_SECONDS = 240.0
TINY = DemoModels("tiny-writer", "tiny_painter_64.safetensors", "tiny_coder.safetensors", "-1")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, comfyui_folder: Path, repository: Path) -> Tree:
    """What install.sh makes, with a copy of the real ComfyUI, this Python as its environment, and tiny models."""
    made = Tree(tmp_path_factory.mktemp("desk") / 'it\'s a "desk"')
    made.make()
    made.write_files()
    left_out = {"custom_nodes", "models", "input", "output", "user", "temp", ".git"}
    shutil.copytree(
        comfyui_folder,
        made.comfyui,
        ignore=lambda folder, _: left_out if Path(folder) == comfyui_folder else {"__pycache__"},
    )
    (made.comfyui / "custom_nodes").mkdir()
    (made.comfyui / "custom_nodes" / "onedesk").symlink_to(repository)
    made.model_paths.write_text(model_paths(made, kinds=()))
    made.save_desk(Desk(str(made.comfyui), sys.executable, made=True))
    write_image_models(made.image_models, (64,))
    write_language_model(made.models / "tiny-writer", hidden=64)
    return made


def test_start_status_stop(tree: Tree) -> None:
    assert status(tree) == ("ComfyUI is not running", False)
    port = free_port()
    argv = [sys.executable, "-m", "onedesk.service.setup.desk", str(tree.prefix), "start", "--port", str(port)]
    argv += ["--", "--disable-all-custom-nodes", "--whitelist-custom-nodes", "onedesk"]
    with (tree.logs / "run.log").open("wb") as log:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        end = time.monotonic() + START_SECONDS
        while not status(tree)[1]:
            assert child.poll() is None, (tree.logs / "run.log").read_text()
            assert time.monotonic() < end, (tree.logs / "run.log").read_text()
            time.sleep(0.2)
        running = find_running(tree)
        assert running is not None
        assert (running.pid, running.port) == (child.pid, port)
        with pytest.raises(PeerError, match="it is already running"):
            start(tree, free_port(), [])
        info = Client(port).ask("/object_info/OnedeskLoadModel")["OnedeskLoadModel"]
        assert "tiny-writer" in json.dumps(info["input"]["required"]["model"])
        assert "tiny_painter_64.safetensors" in json.dumps(Client(port).ask("/object_info/UNETLoader"))
        listening = {
            c.laddr.ip for c in psutil.Process(child.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        assert main([str(tree.prefix), "stop"]) == 0
        child.wait(30)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    assert status(tree) == ("ComfyUI is not running", False)
    assert not stop(tree)
    assert (tree.data / "user" / "comfyui.db").is_file()
    assert not (tree.comfyui / "user").exists()


def test_demo_writes_and_draws(tree: Tree) -> None:
    result = run_demo("a red circle", load_config(tree.settings), models=TINY)
    assert result.idea == "a red circle"
    assert len(result.prompt) > 20
    assert result.picture.parent == tree.data / "output"
    with Image.open(result.picture) as picture:
        assert picture.size == (128, 128)
    assert find_running(tree) is None


def test_demo_tells_what_is_missing(tree: Tree) -> None:
    config = load_config(tree.settings)
    with pytest.raises(FileError, match=r"demo model no\.safetensors is not in models/comfyui/vae"):
        run_demo("x", config, models=DemoModels(TINY.writer, TINY.painter, "no.safetensors", "-1"))
    (tree.image_models / "vae" / "broken.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(PeerError, match="the demo workflow failed"):
        run_demo("x", config, models=DemoModels(TINY.writer, TINY.painter, "broken.safetensors", "-1"))


@pytest.fixture
def empty(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.make()
    return made


@pytest.mark.parametrize("heeds", [True, False], ids=["as ComfyUI does", "a shell's background job"])
def test_stop_lets_a_process_end_what_it_started(empty: Tree, monkeypatch: pytest.MonkeyPatch, heeds: bool) -> None:
    """A service that ComfyUI started is closed by what runs at its exit, which a signal to end skips."""
    monkeypatch.setattr(desk, "INTERRUPT_SECONDS", 10.0 if heeds else 0.2)
    tidied, handler = empty.prefix / "tidied", "default_int_handler" if heeds else "SIG_IGN"
    code = (
        f"import atexit, signal, time; signal.signal(signal.SIGINT, signal.{handler}); atexit.register(open,"
        f" {str(tidied)!r}, 'w')"
    )
    argv = [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(60)"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            note = {"pid": child.pid, "started": psutil.Process(child.pid).create_time(), "port": 1}
            pid_file(empty).write_text(json.dumps(note))
            assert stop(empty)
            assert child.poll() is not None
            assert tidied.exists() is heeds
        finally:
            child.kill()


def test_stop_ends_the_noted_process_and_no_other(empty: Tree) -> None:
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        ours, other = (psutil.Process(child.pid) for child in children)
        pid_file(empty).write_text(json.dumps({"pid": other.pid, "started": other.create_time() - 5, "port": 1}))
        assert find_running(empty) is None
        assert not stop(empty)
        pid_file(empty).write_text(json.dumps({"pid": ours.pid, "started": ours.create_time(), "port": 1}))
        assert find_running(empty) == Running(ours.pid, ours.create_time(), 1)
        assert stop(empty)
        assert children[0].poll() is not None
        assert children[1].poll() is None
        assert not pid_file(empty).exists()
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": 4194305, "started": 0, "port": 1}'])
def test_a_broken_note_counts_for_nothing(empty: Tree, text: str) -> None:
    pid_file(empty).write_text(text)
    assert find_running(empty) is None


def test_start_without_a_comfyui_or_a_free_port(empty: Tree, tree: Tree) -> None:
    with pytest.raises(FileError, match=r"there is no ComfyUI .* run install\.sh again"):
        start(empty, free_port(), [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=f"port {port} is taken"):
            start(tree, port, [])


def test_run_sh_demo_replaces_itself_and_forwards_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: became.append([path, *argv]))
    main([str(tmp_path), "demo", "a red cat"])
    assert became == [[sys.executable, *package_command("onedesk.service", "demo", "a red cat")]]


def test_demo_without_an_installation_says_so(tmp_path: Path) -> None:
    (tmp_path / "onedesk.toml").touch()
    with pytest.raises(FileError, match="run install"):
        run_demo("x", load_config(tmp_path / "onedesk.toml"))


def test_words_after_the_dashes_are_for_comfyui() -> None:
    options = parse(["/desk", "start", "--port", "9000", "--", "--port-like", "--", "x"])
    assert (options.action, options.port, options.more) == ("start", 9000, ["--port-like", "--", "x"])
    assert (parse(["/desk"]).action, parse(["/desk"]).port) == ("start", 8188)


@pytest.mark.parametrize("words", [["dance"], ["start", "--port", "0"], ["start", "--port", "x"], ["--no-such"]])
def test_wrong_use_ends_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(["/desk", *words])
    assert ending.value.code == 2
