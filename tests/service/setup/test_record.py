"""What uninstall may take away: by record and mark, for any files of other people in and around the prefix."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.setup import install
from onedesk.service.setup.adopt import is_installation
from onedesk.service.setup.record import FILE, MARK, Record, load_record
from onedesk.service.setup.source import FILES, additions
from onedesk.service.setup.steps import SetupError, Steps
from onedesk.service.setup.tree import Tree


def contents(folder: Path, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Everything in a folder by its relative path: a file's bytes, a link's target, or that it is a folder;
    `without` these tops.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.partition("/")[0] in without:
            continue
        found[name] = (
            f"-> {path.readlink()}" if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes().hex()
        )
    return found


@dataclass(frozen=True)
class Ground:
    """A folder with a prefix in it, a ComfyUI whose environment is the one that runs the tests, and an empty home."""

    folder: Path
    repository: Path

    @property
    def tree(self) -> Tree:
        return Tree(self.folder / "deep" / "desk")

    @property
    def comfyui(self) -> Path:
        return self.folder / "ComfyUI"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        words = [
            "bash",
            str(self.repository / "install.sh"),
            "--python",
            sys.executable,
            "--prefix",
            str(self.tree.prefix),
            *arguments,
        ]
        variables = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PIP_NO_INDEX": "1", "HOME": str(self.folder / "home")}
        return subprocess.run(words, capture_output=True, text=True, cwd="/", env=variables, timeout=300, check=False)

    def install(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run("--comfyui", str(self.comfyui), "--comfyui-python", sys.executable, *more)


@pytest.fixture
def ground(tmp_path: Path, repository: Path) -> Ground:
    made = Ground(tmp_path, repository)
    (made.comfyui / "comfy").mkdir(parents=True)
    (made.comfyui / "main.py").write_text("print('started')\n")
    (tmp_path / "home").mkdir()
    return made


@pytest.mark.parametrize("name", ["envs", "cache"])
def test_a_prefix_with_foreign_folders_is_refused_unchanged(ground: Ground, name: str) -> None:
    theirs = ground.tree.prefix / name / "mine" / "work.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("precious")
    before = contents(ground.folder)
    for answer in (ground.install(), ground.run("--uninstall")):
        assert answer.returncode == 1
        assert contents(ground.folder) == before
    assert f"{ground.tree.prefix / name} is there and no installation of ours" in ground.install().stderr


def test_a_linked_cache_is_refused_and_never_followed(ground: Ground) -> None:
    disk = ground.folder / "disk"
    disk.mkdir()
    (disk / "pip").mkdir()
    (disk / "pip" / "x").write_text("keep")
    ground.tree.prefix.mkdir(parents=True)
    ground.tree.cache.symlink_to(disk)
    answer = ground.install()
    assert (answer.returncode, "is a link" in answer.stderr) == (1, True)
    ground.tree.cache.unlink()
    assert ground.install().returncode == 0
    shutil.rmtree(ground.tree.cache)
    ground.tree.cache.symlink_to(disk)
    assert ground.install().returncode == 0
    before = contents(disk)
    answer = ground.run("--uninstall")
    assert answer.returncode == 0, answer.stderr
    assert f"kept      {ground.tree.cache}, which is a link" in answer.stdout
    assert f"removed   {ground.tree.cache}" not in answer.stdout
    assert contents(disk) == before
    assert ground.tree.cache.is_symlink()


NAMES = st.sampled_from(
    [
        *(
            "a",
            "mine",
            "envs",
            "cache",
            "models",
            "data",
            "run.sh",
            ".lock",
            "onedesk",
            "service",
            "ComfyUI",
            "pip",
            FILE,
            MARK,
        ),
        *(
            "custom_nodes",
            "onedesk-demo-writer",
            "logs",
            "desk.json",
            "steps",
            "comfyui",
            "vae",
            "onedesk.toml",
            "pack",
        ),
    ]
)
FOREIGN = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=4).map(tuple), st.sampled_from(["text", "folder", "link"]), max_size=8
)


def scatter(folder: Path, foreign: dict[tuple[str, ...], str]) -> None:
    """Put these things there, as far as one does not stand in the other's place."""
    for index, (parts, kind) in enumerate(foreign.items()):
        path = folder.joinpath(*parts)
        if any(parent.is_symlink() or parent.is_file() for parent in (path, *path.parents)) or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(folder)
        else:
            path.write_text(f"of somebody else, {index}\n")


def with_parents(found: dict[str, str]) -> dict[str, str]:
    """The same, with the folders that these things stand in."""
    return {str(parent): "folder" for name in found for parent in Path(name).parents if parent != Path()} | found


# What stands in a folder that goes with all of its content is not somebody else's.
OURS = ("envs/onedesk/", "envs/service/", "envs/pack/", "envs/steps/", "cache/pip/", "cache/logs/")


def added_by(tree: Tree, later: dict[tuple[str, ...], str]) -> dict[str, str]:
    """Scatter `later` in an installation; returns what came to be there and is not in a folder of ours."""
    installed = contents(tree.prefix)
    scatter(tree.prefix, later)
    return {
        name: what
        for name, what in contents(tree.prefix).items()
        if name not in installed and not name.startswith(OURS)
    }


def test_install_and_uninstall_leave_foreign_files_unchanged(ground: Ground) -> None:
    """In and around the prefix, put there before and after the installation."""
    before = {
        ("a",): "text",
        ("desk", "thesis"): "text",
        ("desk", "models", "onedesk-demo-writer"): "link",
        ("desk", "data", "a"): "text",
    }
    later = {("envs", "mine", "a"): "text", ("cache", "thesis"): "text", (".lock",): "text", ("cache", "mine"): "link"}
    scatter(ground.folder / "deep", before)
    first = contents(ground.folder)
    assert ground.install("--service").returncode == 0
    prefix = ground.tree.prefix.relative_to(ground.folder)
    added = {f"{prefix}/{name}": what for name, what in added_by(ground.tree, later).items()}
    assert len(added) == len(later) + 1  # the folder envs/mine
    assert ground.install().returncode == 0
    answer = ground.run("--uninstall")
    assert answer.returncode == 0, answer.stderr
    assert contents(ground.folder) == with_parents(first | added)


@settings(max_examples=25, deadline=None)
@given(before=FOREIGN, later=FOREIGN)
def test_files_of_others_are_the_same_for_any_names(
    tmp_path_factory: pytest.TempPathFactory, before: dict[tuple[str, ...], str], later: dict[tuple[str, ...], str]
) -> None:
    """The same without environments: whatever stands there before, and comes later, under names that could be ours."""
    folder = tmp_path_factory.mktemp("ground")
    tree = Tree(folder / "desk")
    scatter(tree.prefix, before)
    first = contents(folder)
    if not tree.prefix.exists() or fits(tree):
        made(tree.prefix)
        first |= {f"desk/{name}": what for name, what in added_by(tree, later).items()}
        try:
            assert install.uninstall(tree) == 0
        except SetupError:  # `later` broke the record: nothing is known to be ours any more
            return
    elif not is_installation(tree):
        with pytest.raises(SetupError, match="there is no installation"):
            install.uninstall(tree)
    assert contents(folder) == with_parents(first)


def fits(tree: Tree) -> bool:
    """Whether install.sh would take this prefix; it makes nothing before it has looked."""
    try:
        install.check_prefix(tree)
    except SetupError:
        return False
    return install.bad_prefix(tree.prefix) is None and not is_installation(tree)


def made(prefix: Path) -> tuple[Tree, Record]:
    """A tree with its record, without environments."""
    tree = Tree(prefix)
    there = prefix.exists()
    prefix.mkdir(parents=True, exist_ok=True)
    record = install.new_record(tree, [] if there else [prefix])
    install.prepare(tree, record)
    return tree, record


@pytest.mark.parametrize("listed", [True, False])
def test_what_people_put_into_our_comfyui_is_moved_to_their_data(tmp_path: Path, listed: bool) -> None:
    tree, record = made(tmp_path / "desk")
    record.make_tree(tree.comfyui)
    shipped = ["main.py", "comfy/sd.py", "custom_nodes/websocket_image_save.py", "models/vae/put_vae_here"]
    mine = [
        "custom_nodes/mine/__init__.py",
        "models/vae/mine.safetensors",
        "custom_nodes/mine/.git/config",
        "input/photo.png",
    ]
    for name in (*shipped, *mine, "comfy/__pycache__/sd.pyc"):
        (tree.comfyui / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.comfyui / name).write_text(name)
    (tree.comfyui / "custom_nodes" / "linked").symlink_to(tmp_path)
    if listed:
        Steps(tree).mark(FILES, json.dumps(shipped))
    assert install.main(["--prefix", str(tree.prefix), "--uninstall"]) == 0
    assert not tree.envs.exists()
    kept = tree.data / "ComfyUI"
    assert {name for name, what in contents(kept).items() if what != "folder"} == {*mine, "custom_nodes/linked"}
    assert all((kept / name).read_text() == name for name in mine)
    assert (kept / "custom_nodes" / "linked").readlink() == tmp_path


def test_a_folder_that_took_the_place_of_ours_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree, record = made(tmp_path / "desk")
    record.make_tree(tree.envs / "service")
    shutil.rmtree(tree.envs / "service")
    (tree.envs / "service").mkdir()
    (tree.envs / "service" / "work.txt").write_text("precious")
    with pytest.raises(SetupError, match="not made by this installation"):
        record.make_tree(tree.envs / "service")
    (tree.envs / "other").mkdir()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tree.pack, elsewhere)
    shutil.rmtree(tree.pack)
    tree.pack.symlink_to(elsewhere)
    assert not record.owns_tree(tree.pack)
    assert install.main(["--prefix", str(tree.prefix), "--uninstall"]) == 0
    assert (tree.envs / "service" / "work.txt").read_text() == "precious"
    assert (elsewhere / MARK).is_file()
    assert tree.pack.is_symlink()


def test_a_copied_installation_is_new_a_moved_one_is_not(tmp_path: Path) -> None:
    tree, record = made(tmp_path / "desk")
    link = tmp_path / "custom_nodes" / "onedesk"
    link.parent.mkdir()
    record.note_link(link, tree.pack)
    link.symlink_to(tree.pack)
    shutil.copytree(tree.prefix, tmp_path / "copy", symlinks=True)
    assert install.main(["--prefix", str(tmp_path / "copy"), "--uninstall"]) == 0
    assert not (tmp_path / "copy").exists()
    assert link.is_symlink()
    tree.prefix.rename(tmp_path / "moved")
    moved = load_record(tmp_path / "moved")
    assert moved is not None
    assert (moved.id, moved.prefix) == (record.id, tmp_path / "moved")
    assert install.main(["--prefix", str(tmp_path / "moved"), "--uninstall"]) == 0
    assert not link.is_symlink()
    assert not (tmp_path / "moved").exists()


def test_an_earlier_versions_installation_is_recognized(tmp_path: Path, repository: Path) -> None:
    tree = Tree(tmp_path / "desk")
    tree.make()
    tree.write_files()
    (tree.prefix / ".lock").touch()
    (tree.envs / "steps").mkdir()
    (tree.envs / "steps" / "packages").write_text("key")
    (tree.envs / "onedesk").mkdir()
    (tree.envs / "onedesk" / "pyvenv.cfg").touch()
    (tree.envs / "conda").mkdir()  # no pyvenv.cfg of ours
    writer = repository / "models" / "onedesk-demo-writer"
    (tree.models / writer.name).symlink_to(writer)
    (tree.models / "onedesk-demo-own").symlink_to(tmp_path)
    assert install.main(["--prefix", str(tree.prefix), "--uninstall"]) == 0
    assert sorted(contents(tree.prefix)) == ["envs", "envs/conda", "models", "models/onedesk-demo-own"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 1}', '{"format": 2}', '{"format": 1, "prefix": 3}'])
def test_a_damaged_record_is_an_error_and_nothing_is_removed(
    tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tree, _ = made(tmp_path / "desk")
    (tree.prefix / FILE).write_text(text)
    before = contents(tree.prefix)
    assert install.main(["--prefix", str(tree.prefix), "--uninstall"]) == 1
    assert f"{tree.prefix / FILE}" in capfd.readouterr().err
    assert {name: what for name, what in contents(tree.prefix).items() if name != ".onedesk.lock"} == before


def test_an_interrupted_removal_is_ended_by_the_next(tmp_path: Path) -> None:
    """What an interruption leaves: the record, which goes last, without some of what it lists."""
    tree, record = made(tmp_path / "desk")
    record.make_tree(tree.envs / "service")
    shutil.rmtree(tree.pack)
    tree.script.unlink()
    assert install.main(["--prefix", str(tree.prefix), "--uninstall"]) == 0
    assert not tree.prefix.exists()


def test_additions_are_folders_without_release_files(tmp_path: Path) -> None:
    for name in ("main.py", "custom_nodes/a/b/c.py", "custom_nodes/shipped.py", "empty/x/"):
        path = tmp_path / name
        path.mkdir(parents=True) if name.endswith("/") else path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    found = additions(tmp_path, {"main.py", "custom_nodes/shipped.py"})
    assert [str(path.relative_to(tmp_path)) for path in found] == ["custom_nodes/a"]


def test_uninstall_names_what_it_leaves(ground: Ground) -> None:
    assert ground.install().returncode == 0
    tree = ground.tree
    (tree.envs / "mine").mkdir()
    (tree.cache / "notes").write_text("keep")
    (tree.models / "own").mkdir()
    answer = ground.run("--uninstall")
    assert answer.returncode == 0, answer.stderr
    assert f"kept      {tree.envs / 'mine'}, which this installation did not make" in answer.stdout
    assert f"cleared   {tree.cache}, except for what is named above" in answer.stdout
    left = sorted(entry.name for entry in tree.prefix.iterdir())
    assert f"left      in {tree.prefix}: {', '.join(left)}; delete what you do not need" in answer.stdout
    assert {"envs", "cache", "models"} <= set(left)
