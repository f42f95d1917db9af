"""The systemd user unit on a home of its own, with a systemctl that writes down what it is asked, one that fails,
and none.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from onedesk.service.peers.note import Note, noted, only_one
from onedesk.service.setup import install
from onedesk.service.setup.record import Record
from onedesk.service.setup.steps import SetupError
from onedesk.service.setup.tree import Tree
from onedesk.service.setup.unit import NAME, add_unit, remove_unit, unit_path, unit_text

CHECKOUT = Path("/srv/onedesk")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """An installation in a folder that every quoting can break on, in an empty home without systemd."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return Tree(tmp_path / "my \"desk\" 100% $HOME 'x' \\n")


def systemctl(tmp_path: Path, status: int = 0) -> Path:
    log = tmp_path / "asked"
    script = tmp_path / "bin" / "systemctl"
    script.write_text(f'#!/bin/sh\necho "$@" >> {log}\necho "Failed to connect to bus: no medium" >&2\nexit {status}\n')
    script.chmod(0o755)
    return log


def command_of(tree: Tree) -> Path:
    return tree.envs / "onedesk" / "bin" / "onedesk"


@pytest.fixture
def record(tree: Tree) -> Record:
    tree.prefix.mkdir()
    return Record(tree.prefix)


def test_it_is_written_where_systemd_looks_and_started(tree, record, tmp_path, caplog):
    asked = systemctl(tmp_path)
    caplog.set_level("INFO")
    add_unit(tree, command_of(tree), CHECKOUT, record)
    assert unit_path() == tmp_path / "home" / ".config" / "systemd" / "user" / "onedesk.service"
    assert asked.read_text().splitlines() == ["--user daemon-reload", f"--user enable --now {NAME}"]
    assert "onedesk.service runs" in caplog.text
    written = unit_path().stat()
    add_unit(tree, command_of(tree), CHECKOUT, record)
    assert unit_path().stat() == written
    remove_unit(record)
    assert asked.read_text().splitlines()[-2:] == [f"--user disable --now {NAME}", "--user daemon-reload"]
    assert not unit_path().exists()


@pytest.mark.parametrize(
    ("status", "reason"), [(None, "there is no systemctl here"), (1, "daemon-reload failed: Failed to connect to bus")]
)
def test_without_systemd_it_says_what_to_run(tree, record, tmp_path, caplog, status, reason):
    if status is not None:
        systemctl(tmp_path, status)
    caplog.set_level("INFO")
    add_unit(tree, command_of(tree), CHECKOUT, record)
    assert unit_path().is_file()
    assert reason in caplog.text
    assert f"systemctl --user daemon-reload && systemctl --user enable --now {NAME}" in caplog.text
    remove_unit(record)
    assert not unit_path().exists()


def test_a_unit_that_is_not_ours_stays(tree, record, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = unit_path()
    assert path.is_relative_to(tmp_path / "config")
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(SetupError, match="is there already and is not ours; move it away"):
        add_unit(tree, command_of(tree), CHECKOUT, record)
    remove_unit(record)
    assert path.read_text().startswith("[Service]")
    other = Tree(tmp_path / "other")
    path.write_text(unit_text(other, command_of(other), CHECKOUT, "b"))
    with pytest.raises(
        SetupError, match=r"is of the installation in .*other; take --service out, or uninstall that one first"
    ):
        add_unit(tree, command_of(tree), CHECKOUT, record)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SetupError, match="is not ours"):
        add_unit(tree, command_of(tree), CHECKOUT, record)


def test_its_words_survive_systemds_quoting(tree):
    lines = unit_text(tree, command_of(tree), CHECKOUT, "a").splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    path = str(command_of(tree)).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert start == f'ExecStart=/usr/bin/env "{path.replace("$", "$$")}" serve'
    cache = str(tree.cache).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'Environment="PIP_CACHE_DIR={cache}/pip"' in lines
    assert 'Environment="HF_HUB_OFFLINE=1"' in lines
    assert not any(token in line.lower() for line in lines for token in ("password", "token="))


def test_uninstall_removes_it_but_not_under_a_service_that_runs(tree, record, tmp_path, capsys, caplog):
    record = install.new_record(tree, [])
    install.prepare(tree, record)
    add_unit(tree, command_of(tree), CHECKOUT, record)
    words = ["--prefix", str(tree.prefix), "--uninstall"]
    with only_one(tree.cache), noted(tree.cache, Note(os.getpid(), "1", "127.0.0.1", 1, None, None)):
        assert install.main(words) == 1
    assert f"a service still runs from {tree.prefix} (process {os.getpid()}); end it first" in capsys.readouterr().err
    assert tree.envs.is_dir()
    assert install.main(words) == 0
    assert not unit_path().exists()
    assert not tree.envs.exists()
