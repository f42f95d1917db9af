"""How the command ends: signals, readers that leave, full disks, encodings, closed streams."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import COMMAND, ENDS_WITHIN, start
from kept_kernels import keep_kernels
from onedesk.service import __main__ as door
from onedesk.service.cli import command as cli
from onedesk.service.registry import REGISTRY
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def slow(tree: Path) -> Path:
    """A model with room for minutes of tokens."""
    return write_tiny_qwen3(tree.parent / "slow", layers=12, context=200_000)


ENDLESS = ("--ids", "1,2", "--max-tokens", "190000", "--context", "199000", "--greedy")


@pytest.fixture
def endless(tree: Path, slow: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """The command, writing a text without end; its first byte has been read."""
    config = tmp_path / "tree"
    config.mkdir()
    shutil.copy(tree / "onedesk.toml", config)
    keep_kernels(config / "cache")  # else stderr says that they are compiled
    child = start(config, "generate", "--model", str(slow), *ENDLESS)
    assert child.stdout is not None
    try:
        assert child.stdout.read(1)
        yield child
    finally:
        child.kill()
        child.communicate()


def test_sigint_prints_what_was_written_and_ends_with_130(endless):
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=ENDS_WITHIN)
    assert endless.returncode == 130
    assert out.endswith(b"\n")
    assert b"[cancelled: 2 + " in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("words", [("models",), ("models", "--json")], ids=" ".join)
def test_an_early_interrupt_shows_no_traceback(words, monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "onedesk.service.cli.command":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "onedesk.service.cli.command")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["onedesk", *words])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert door.main() == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
    shown = capsys.readouterr()
    if "--json" in words:
        assert json.loads(shown.out) == {"error": {"type": "Cancelled", "message": "interrupted"}}
    else:
        assert shown == ("", "onedesk: interrupted\n")


def test_sigterm_ends_the_command(endless):
    endless.terminate()
    endless.communicate(timeout=ENDS_WITHIN)
    assert endless.returncode == -signal.SIGTERM


def test_a_reader_that_leaves_ends_it_quietly(endless):
    endless.stdout.close()
    assert endless.stderr.read() == b""
    assert endless.wait(ENDS_WITHIN) == 1


def test_any_console_encoding_is_safe(tree):
    options = ("--model", "tiny", "--greedy", "--max-tokens", "20", "--repetition-stop", "off")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    child = start(tree, "generate", "猫", *options, env=environment)
    out, err = child.communicate(timeout=ENDS_WITHIN)
    assert (child.returncode, b"Traceback" in err) == (0, False)
    assert b"\\ufffd" in out
    assert out.isascii()


def test_a_closed_stderr_puts_nothing_on_stdout(tree):
    arguments = [
        "generate",
        "a cat",
        "--model",
        "tiny",
        "--max-tokens",
        "2",
        "--config",
        str(tree / "onedesk.toml"),
        "--json",
    ]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, *arguments]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, timeout=ENDS_WITHIN)
    assert (done.returncode, json.loads(done.stdout)["finish"]) == (0, "length")


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_full_disk_behind_stdout_is_told_without_a_traceback(tree, form):
    arguments = [
        "generate",
        "a cat",
        "--model",
        "tiny",
        "--max-tokens",
        "2",
        "--config",
        str(tree / "onedesk.toml"),
        *form,
    ]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=ENDS_WITHIN,
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"No space left on device" in done.stderr


def test_a_chat_without_a_standard_input_ends(tree, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat", "--model", "tiny", "--config", str(tree / "onedesk.toml")]) == 0


def test_a_chat_that_is_interrupted_while_it_opens_ends(tree, capsys, monkeypatch):
    opened = type(REGISTRY).open

    def interrupted(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return opened(self, *arguments, **options)

    monkeypatch.setattr(type(REGISTRY), "open", interrupted)
    assert cli.main(["chat", "--model", "tiny", "--config", str(tree / "onedesk.toml")]) == 130
    assert capsys.readouterr().err == "onedesk: interrupted\n"


def test_bytes_that_are_no_text_are_refused(tree):
    child = start(tree, "generate", b"a cat \xff", "--model", "tiny", "--json")
    out, _ = child.communicate(timeout=ENDS_WITHIN)
    assert child.returncode == 1
    assert "lone surrogate U+DCFF" in json.loads(out)["error"]["message"]


def test_text_goes_to_stdout_and_the_rest_to_stderr(tree, capsys, run):
    wanted = run("generate", "a cat", "--model", "tiny", "--greedy", "--max-tokens", "6")[1]["text"]
    status = cli.main(
        [
            "generate",
            "a cat",
            "--model",
            "tiny",
            "--greedy",
            "--max-tokens",
            "6",
            "--config",
            str(tree / "onedesk.toml"),
        ]
    )
    out, err = capsys.readouterr()
    assert (status, out) == (0, wanted + "\n")
    assert err.startswith("[length: ")
