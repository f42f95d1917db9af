"""What `onedesk serve` says of its settings before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from onedesk.service import cli
from onedesk.service.server.command import _plan


def test_a_model_folder_that_is_not_there_is_named_with_where_it_was_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, file = tmp_path / "models", tmp_path / "file"
    there.mkdir()
    file.touch()
    (tmp_path / "onedesk.toml").write_text('[models]\nroots = ["models", "lost"]\n', encoding="utf-8")
    words = ["serve", "--config", str(tmp_path / "onedesk.toml"), "--no-token", "--roots", str(file), "--roots", str(there)]
    plan = _plan(cli._parser().parse_args(words))
    assert plan.config.model_roots[:3] == (file, there, tmp_path / "lost")
    assert caplog.messages == [
        f"the model folder {file} cannot be read, so none of its models is served; make it, or correct --roots",
        f"the model folder {tmp_path / 'lost'} cannot be read, so none of its models is served; make it, or correct roots under [models] "
        "in onedesk.toml",
    ]
