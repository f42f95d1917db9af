"""The hubs' own client packages are satisfied by the stand-in: it imitates their protocols, not our reading of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bound import bound
from hub_server import Hub
from pulling import Desk

ENDS_WITHIN = 120  # seconds; importing the packages takes several on a busy machine
HUGGING_FACE = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download("tiny/model", local_dir=sys.argv[1], endpoint=sys.argv[2], cache_dir=sys.argv[3]))
"""
CACHE = """
import sys
from huggingface_hub import snapshot_download
print(snapshot_download("tiny/model", endpoint=sys.argv[2], cache_dir=sys.argv[3]))
"""
MODELSCOPE = """
import sys
from modelscope_hub.compat.snapshot_download import snapshot_download
print(snapshot_download("tiny/model", local_dir=sys.argv[1], endpoint=sys.argv[2], cache_dir=sys.argv[3]))
"""


def run(code: str, folder: Path, hub: Hub, cache: Path) -> str:
    home = {
        "HF_HOME": str(cache),
        "MODELSCOPE_CACHE": str(cache),
        "HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    child = subprocess.run(
        bound([sys.executable, "-c", code, str(folder), hub.address, str(cache)]),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN,
        check=False,
        env={**os.environ, **home, "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("code", [HUGGING_FACE, MODELSCOPE], ids=["huggingface_hub", "modelscope-hub"])
def test_the_clients_own_download_has_every_file_of_the_stand_in(hub: Hub, tmp_path: Path, code: str):
    folder = Path(run(code, tmp_path / "files", hub, tmp_path / "cache"))
    for path, content in hub.repositories["tiny/model"].files.items():
        assert (folder / path).read_bytes() == content, path


def test_a_cache_of_hugging_faces_client_is_imported_without_a_connection(desk: Desk, tmp_path: Path):
    run(CACHE, tmp_path, desk.hub, tmp_path / "cache")
    desk.environment["HF_HUB_OFFLINE"] = "1"
    desk.hub.asked.clear()
    done = desk.pull(local=tmp_path / "cache")
    assert desk.hub.asked == []
    assert done["fetched"] == 0
    assert desk.same_files()
    assert done["commit"] == "c" * 40
    assert json.loads((desk.models / "model" / "onedesk.json").read_text())["repo"] == "tiny/model"
