"""Who may come in: the token, Host and Origin, and the file that the token is kept in."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from onedesk.service.cli import command as cli
from onedesk.service.errors import FileError, RequestError
from onedesk.service.peers.token_file import load_token, matches, read_token
from onedesk.service.server.guard import is_loopback, own_names
from onedesk.service.server.routes import ROUTES
from serving import MODEL, Server

PATHS = [(route.method, route.path.replace("{name:.+}", MODEL).replace("{key}", "x")) for route in ROUTES] + [
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_without_the_token_only_health_answers(server: Server, method: str, path: str) -> None:
    for shown in (
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {server.token}",
        f"Bearer {server.token}x",
        f"Bearer {server.token[:-1]}",
        "Bearer \xff",
    ):
        status, headers, document = server.ask(
            method, path, b"{}" if method == "POST" else None, headers={"Authorization": shown}
        )
        if path == "/health":
            assert (status, document["live"], set(document)) == (
                200,
                True,
                {"live", "ready", "version", "asleep", "wake"},
            )
        else:
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert document["error"]["type"] == "authentication_error"
            assert server.token not in str(document)
    assert server.ask("GET", "/v1/models", headers={"Authorization": f"bearer {server.token}"})[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8787",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "[::1",
        "",
        "127.0.0.1/x",
        "0.0.0.0",
    ],
)
def test_a_host_that_is_not_ours(server: Server, host: str) -> None:
    for path in ("/health", "/v1/models"):
        assert server.ask("GET", path, headers={"Host": host})[0] in (400, 403)


def test_hosts_that_are_ours(server: Server) -> None:
    for host in ("localhost", f"localhost:{server.port}", "127.0.0.1", f"[::1]:{server.port}", "LOCALHOST"):
        assert server.ask("GET", "/v1/models", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_web_page_is_not_answered(server: Server, headers: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/v1/models"),
    ):
        status, found, _ = server.ask(method, path, b"{}" if method == "POST" else None, headers=headers)
        assert status == 403
        assert not [name for name in found if name.lower().startswith("access-control")]


def test_the_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "service.token"
    before = os.umask(0)
    try:
        token = load_token(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token(path) == read_token(path) == token
    assert len(token) >= 32
    assert load_token(tmp_path / "other.token") != token
    assert matches(token, token)
    assert not matches(token + " ", token)
    assert not matches("\udcff", token)


def test_a_token_file_is_complete_or_absent(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom onedesk.service.errors import FileError\nfrom"
        " onedesk.service.peers.token_file import load_token\nsignal.signal(signal.SIGXFSZ,"
        " signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\ntry:\n   "
        " load_token(Path(sys.argv[1]))\nexcept FileError as error:\n    print(error)\n"
    )
    path = tmp_path / "service.token"
    for size in (0, 1, 20):
        told = subprocess.run(
            [sys.executable, "-c", code, str(path), str(size)], capture_output=True, text=True, timeout=60, check=True
        )
        assert "cannot be made" in told.stdout
        assert list(tmp_path.iterdir()) == []
    assert len(load_token(path)) >= 32


@pytest.mark.parametrize("step", ["open", "fsync", "link", "unlink"])
def test_a_killed_start_does_not_block_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "service.token"

    class KilledError(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", die)  # a killed process tidies nothing up
        if step != "unlink":
            patch.setattr(os, step, die)
        with pytest.raises(KilledError):
            load_token(path)
    assert path.exists() == (step == "unlink")
    assert load_token(path) == load_token(path)


def test_services_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    for round in range(20):
        path, together = tmp_path / f"{round}.token", threading.Barrier(8)

        def load(path: Path = path, together: threading.Barrier = together) -> str:
            together.wait()
            return load_token(path)

        with ThreadPoolExecutor(8) as threads:
            assert len({one.result() for one in [threads.submit(load) for _ in range(8)]}) == 1
    assert len(list(tmp_path.iterdir())) == 20


def test_a_token_file_that_cannot_be_trusted(tmp_path: Path) -> None:
    path = tmp_path / "service.token"
    for content in ("", "short", "with a blank inside it", "x" * 5000, "nötig-nötig-nötig", "\x00" * 20):
        path.write_text(content, encoding="utf-8")
        path.chmod(0o600)
        with pytest.raises(FileError, match="holds no token"):
            load_token(path)
    path.write_text("x" * 32, encoding="utf-8")
    for mode in (0o640, 0o604, 0o644, 0o620):
        path.chmod(mode)
        with pytest.raises(FileError, match="chmod 600") as failed:
            load_token(path)
        assert "xxxx" not in str(failed.value)
    with pytest.raises(FileError):
        load_token(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(FileError):
        load_token(fifo)


def test_loopback_and_the_names_of_a_service() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1")))
    with pytest.raises(RequestError, match="cannot be found"):
        is_loopback("no such host")
    assert "*" not in own_names("127.0.0.1")
    assert "*" in own_names("0.0.0.0")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--no-token", "--host", "0.0.0.0"], 2, "works on loopback only"),
        (["--no-token", "--token-file", "x"], 2, "exclude each other"),
        (["--uds", "x.sock", "--port", "5"], 2, "--uds goes without"),
        (["--port", "65536"], 2, "0 to 65535"),
        (["--port", "-1"], 2, "not a whole number"),
        (["--model", "nobody"], 1, "there is no model"),
        (["--model", "../writer"], 1, "is not allowed"),
        (["--host", "no such host", "--no-token"], 1, "cannot be found"),
    ],
)
def test_wrong_use_ends_before_anything_listens(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, says: str
) -> None:
    config = tmp_path / "onedesk.toml"
    config.write_text(f'[models]\nroots = ["{server.tree / "models"}"]\n', encoding="utf-8")
    assert cli.main(["serve", "--config", str(config), *arguments]) == status
    assert says in capsys.readouterr().err


def test_a_second_service_of_the_same_tree_is_refused(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", str(server.tree / "onedesk.toml"), "--port", "0"]) == 1
    assert f"runs already (process {server.note.pid if server.note else 0}" in capsys.readouterr().err
