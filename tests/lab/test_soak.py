"""The soak in a short form: a real service, a crowd of clients, releases in between. And that it would find what it
looks for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onedesk.lab import soak as module
from onedesk.lab.soak import ACTS, Crowd, Load, main, soak
from onedesk.service.config import Config, load_config
from onedesk.service.errors import PeerError
from onedesk.service.peers.peer import PeerAddress
from serving import MODEL, THINKER, Server, write_tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("soak"), "deadline = 60")


def test_a_crowd_leaves_nothing_behind(tree: Path) -> None:
    told: list[str] = []
    document = soak(
        Load((MODEL, THINKER), seconds=6.0, clients=6, tokens=5), load_config(tree / "onedesk.toml"), say=told.append
    )
    assert document["examples"] == []
    assert (document["ok"], document["mixed"], document["failed"]) == (True, 0, 0)
    assert set(document["requests"]) == set(ACTS)
    assert document["released"]["measured"] >= 0.98 * document["released"]["asked"] > 0
    assert document["waiting"]["p99"] < 60
    assert document["drift_bytes"] < module.DRIFT
    assert len(told) == len(document["bytes_at_rest"]) == 3


def test_texts_that_are_mixed_up_would_be_found() -> None:
    crowd = Crowd(PeerAddress("x"), Load((MODEL,), 1.0), {(MODEL, 1): "mine"})
    crowd._compare(MODEL, 1, "mine")
    assert crowd.seen.mixed == []
    crowd._compare(MODEL, 1, "yours")
    assert crowd.seen.mixed == ["writer with seed 1: 'yours', alone 'mine'"]


def test_it_needs_its_own_service_and_reports_a_failed_start(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerError, match=r"there is no onedesk.toml; name one with --config"):
        soak(Load((MODEL,), 1.0), Config(tree=tree))
    server = Server(tree).start()
    try:
        assert main(["--config", str(tree / "onedesk.toml"), "--minutes", "0.01"]) == 1
    finally:
        server.stop()
    assert "a service of this tree runs already" in json.loads(capsys.readouterr().out)["error"]["message"]
    with pytest.raises(SystemExit, match="2"):
        main(["--minutes", "0"])
