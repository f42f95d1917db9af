"""A tree with a tiny model, and the command run in this process against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from kept_kernels import keep_kernels
from onedesk.service import config as config_module
from onedesk.service.cli import command as cli
from tiny_qwen3 import write_tiny_qwen3


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with onedesk.toml and the model `tiny`; its context is 256."""
    tree = tmp_path_factory.mktemp("tree")
    write_tiny_qwen3(tree / "models" / "tiny", context=256)
    (tree / "onedesk.toml").write_text("[models]\ncontext = 256\n", encoding="utf-8")
    keep_kernels(tree / "cache")
    return tree


@pytest.fixture(autouse=True)
def no_shipped_models(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the models that a test writes are there, not the toys of the checkout."""
    monkeypatch.setattr(config_module, "package_folder", lambda: tree / "models" / "tiny")


@pytest.fixture
def run(tree: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process against the tree; returns its status and the one JSON document on stdout."""

    def call(*arguments: str, config: Path = tree / "onedesk.toml") -> tuple[int, Any]:
        capsys.readouterr()
        status = cli.main([*arguments, "--config", str(config), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return call
