"""What `onedesk serve` says of its settings before it listens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from onedesk.service.cli import command as cli
from onedesk.service.cli import serve as command
from onedesk.service.cli.serve import TURN, _plan


def test_a_missing_model_folder_is_named_with_its_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, file = tmp_path / "models", tmp_path / "file"
    there.mkdir()
    file.touch()
    (tmp_path / "onedesk.toml").write_text('[models]\nroots = ["models", "lost"]\n', encoding="utf-8")
    words = [
        "serve",
        "--config",
        str(tmp_path / "onedesk.toml"),
        "--no-token",
        "--roots",
        str(file),
        "--roots",
        str(there),
    ]
    plan = _plan(cli.make_parser().parse_args(words))
    assert plan.config.model_roots[:3] == (file, there, tmp_path / "lost")
    assert caplog.messages == [
        f"the model folder {file} cannot be read, so none of its models is served; make it, or correct --roots",
        (
            f"the model folder {tmp_path / 'lost'} cannot be read, so none of its models is served; make it, or correct"
            " roots under [models] in onedesk.toml"
        ),
    ]


def test_its_threads_take_turns_before_a_token_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = sys.getswitchinterval(), []

    def run(service: Coroutine[Any, Any, bool]) -> bool:
        service.close()
        seen.append(sys.getswitchinterval())
        return True

    monkeypatch.setattr(asyncio, "run", run)
    (tmp_path / "onedesk.toml").touch()
    try:
        assert (
            command.serve(
                cli.make_parser().parse_args(["serve", "--config", str(tmp_path / "onedesk.toml"), "--no-token"])
            )
            == 0
        )
    finally:
        sys.setswitchinterval(before)
    assert seen == [pytest.approx(TURN)]
    assert before > TURN
