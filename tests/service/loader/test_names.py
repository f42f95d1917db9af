"""Names: what a model folder offers, and that no name leads out of the folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.errors import FileError, ModelError, OnedeskError
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.names import ModelRoots
from raw_safetensors import write_tensors


def make_model(folder: Path, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    write_tensors(folder / file, {"w": ("F16", [1], b"ab")})
    return folder


def make_file(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    return made


def names(*roots: Path) -> list[str]:
    return [entry.name for entry in ModelRoots(roots).list()]


def test_folders_are_offered_as_they_are_dropped_in(root: Path) -> None:
    assert names(root) == []
    make_model(root / "Qwen3-0.6B")
    make_model(root / "Qwen" / "Qwen3-4B")
    make_model(root / "通义" / "千问")
    assert names(root) == ["Qwen/Qwen3-4B", "Qwen3-0.6B", "通义/千问"]
    roots = ModelRoots([root])
    for entry in roots.list():
        assert roots.resolve(entry.name) == roots.find(entry.name) == entry.path
        assert open_checkpoint(entry.path).weight_bytes == 2


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "model.safetensors.index.json",
        "x.safetensors",
        "x.gguf",
        "pytorch_model.bin",
        "model.safetensors.part",
    ],
)
def test_a_broken_folder_is_offered_with_its_reason(root: Path, file: str) -> None:
    make_file(root / "Broken" / file)
    make_file(root / "org" / "Broken" / file)
    assert names(root) == ["Broken", "org/Broken"]
    for name in names(root):
        with pytest.raises(OnedeskError):
            open_checkpoint(ModelRoots([root]).resolve(name))


def test_a_link_back_to_the_models_does_not_rename_them(root: Path, tmp_path: Path) -> None:
    make_model(root / "writer")
    make_model(root / "Qwen" / "small")
    (root / "all").symlink_to(".")
    (root / "up").symlink_to(Path("..", root.name))
    (tmp_path / "linked").symlink_to(root)
    for where in (root, tmp_path / "linked"):
        assert names(where) == ["Qwen/small", "writer"]


def test_what_is_no_model_is_not_offered(root: Path) -> None:
    for path in (
        "comfyui/vae/x.safetensors",
        "comfyui/config.json",
        ".cache/x/config.json",
        ".hidden/config.json",
        "org/.locks/config.json",
    ):
        make_file(root / path)
    for path in ("empty/readme.txt", "loose.safetensors", "notes.txt", "a/b/c/config.json"):
        make_file(root / path)
    assert names(root) == []


def test_lone_files_with_one_configuration_are_offered_each(root: Path) -> None:
    make_model(root, "a.safetensors")
    make_model(root, "b.safetensors")
    make_model(root / "pair", "x.safetensors")
    make_model(root / "pair", "y.safetensors")
    make_model(root / "one", "z.safetensors")
    assert names(root) == ["a.safetensors", "b.safetensors", "one", "pair/x.safetensors", "pair/y.safetensors"]
    for entry in ModelRoots([root]).list():
        assert open_checkpoint(ModelRoots([root]).resolve(entry.name)).weight_bytes == 2


def test_a_root_may_be_a_model_itself(root: Path) -> None:
    make_model(root)
    assert names(root) == ["models"]
    make_model(root / "single", "model-00001-of-00002.safetensors")
    make_file(root / "single" / "adapter.safetensors")
    assert names(root) == ["models", "single"]
    assert ModelRoots([root]).resolve("models") == root


def test_an_organization_may_hold_loose_files_beside_its_models(root: Path) -> None:
    make_model(root / "org" / "model")
    make_file(root / "org" / "x.gguf")
    make_file(root / "org" / "model.safetensors.part")
    assert names(root) == ["org", "org/model"]


def test_the_same_name_in_two_roots_is_told_apart(tmp_path: Path) -> None:
    first, second, third = (make_model(tmp_path / place / "Qwen") for place in ("llm", "tree", "other/tree"))
    roots = ModelRoots([tmp_path / "llm", tmp_path / "tree", tmp_path / "other" / "tree"])
    assert [entry.name for entry in roots.list()] == ["Qwen", "Qwen [tree]", "Qwen [tree 2]"]
    assert [roots.resolve(entry.name) for entry in roots.list()] == [first, second, third]
    assert roots.resolve("Qwen [llm]") == first
    (first / "config.json").unlink()
    (first / "model.safetensors").unlink()
    assert roots.resolve("Qwen") == roots.resolve("Qwen [tree]") == second


def test_one_folder_seen_through_two_roots_is_one_model(tmp_path: Path, root: Path) -> None:
    make_model(root / "Qwen")
    (tmp_path / "llm").symlink_to(root)
    (root / "Alias").symlink_to("Qwen")
    assert names(root, tmp_path / "llm", root) == ["Qwen"]


def test_roots_that_do_not_exist_are_empty(tmp_path: Path, root: Path) -> None:
    make_model(root / "Qwen")
    make_file(tmp_path / "file")
    assert names(tmp_path / "absent", tmp_path / "file", root) == ["Qwen"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../models/Qwen",
        "Qwen/..",
        "a/../Qwen",
        "/etc",
        "/",
        "Qwen/",
        "//Qwen",
        "./Qwen",
        "Qwen\\x",
        "..\\Qwen",
        "Q\0",
        "Q\n",
        "\ud800",
    ],
)
def test_a_name_that_could_leave_the_roots_is_refused(root: Path, name: str) -> None:
    make_model(root / "Qwen")
    with pytest.raises(FileError, match="is not allowed; use a name") as caught:
        ModelRoots([root]).resolve(name)
    assert str(root) not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("link", ["folder", "org/folder", "link.safetensors"])
def test_a_symlink_out_of_the_roots_is_refused(tmp_path: Path, root: Path, link: str) -> None:
    outside = make_model(tmp_path / "outside" / "secret")
    make_file(root / "config.json", b'{"model_type": "qwen3"}')
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(outside / "model.safetensors" if link.endswith("s") else outside)
    assert names(root) == []
    with pytest.raises(FileError, match="is a symlink that leaves the model folders") as caught:
        ModelRoots([root]).resolve(link)
    assert "secret" not in str(caught.value)


def test_a_symlink_may_lead_to_another_root_or_target(tmp_path: Path, root: Path) -> None:
    cached = make_model(tmp_path / "cache" / "blobs" / "0123")
    (root / "Qwen").symlink_to(cached)
    assert names(root) == []
    roots = ModelRoots([root], targets=[tmp_path / "cache"])
    assert [entry.name for entry in roots.list()] == ["Qwen"]
    assert open_checkpoint(roots.resolve("Qwen"), roots=roots.bases).weight_bytes == 2


def test_a_refused_link_names_the_setting_to_change(tmp_path: Path, root: Path) -> None:
    target = make_model(tmp_path / "disk" / "Linked")
    (root / "Linked").symlink_to(target)
    (root / "comfyui").symlink_to(tmp_path / "disk")
    roots = ModelRoots([root])
    assert roots.list() == []
    (link,) = roots.refused_links()
    assert (link.name, link.path) == ("Linked", root / "Linked")
    assert (
        f"it is a link to {str(target)!r}, which is in none of the model folders; add the folder that its target lies"
        " in to roots" in link.reason
    )
    assert link.reason.endswith(f": {json.dumps(str(target.parent))}")
    with pytest.raises(
        FileError, match="leaves the model folders; add the folder that its target lies in to roots under"
    ) as caught:
        roots.resolve("Linked")
    assert str(tmp_path) not in str(caught.value)
    with pytest.raises(FileError, match="the model 'Linked' cannot be opened: it is a link to"):
        roots.find("Linked")
    named = ModelRoots([root, target.parent])
    assert [entry.name for entry in named.list()] == ["Linked"]
    assert named.refused_links() == []
    assert open_checkpoint(named.resolve("Linked"), roots=named.bases).weight_bytes == 2


def make_snapshot(hub: Path, owner: str, name: str, commit: str) -> Path:
    """A model as the hub's client keeps it: files in blobs/, links to them in the snapshot."""
    repository = hub / f"models--{owner}--{name}"
    made = make_model(repository / "made")
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for file in made.iterdir():
        file.rename(repository / "blobs" / f"{commit}-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{commit}-{file.name}"))
    made.rmdir()
    return snapshot


@pytest.mark.parametrize("below", ["", "hub"])
def test_the_hub_s_own_cache_may_be_a_root(root: Path, below: str) -> None:
    hub = root / below
    older, newer = (make_snapshot(hub, "Qwen", "Tiny-4B", commit) for commit in ("0123", "4567"))
    os.utime(older, ns=(0, 0))
    (hub / "models--Qwen--Unfinished" / "blobs").mkdir(parents=True)
    (hub / "datasets--a--b" / "snapshots" / "89").mkdir(parents=True)
    roots = ModelRoots([root])
    assert [(entry.name, entry.path) for entry in roots.list()] == [("Qwen/Tiny-4B", newer)]
    (hub / "models--Qwen--Tiny-4B" / "refs").mkdir()
    (hub / "models--Qwen--Tiny-4B" / "refs" / "main").write_text("0123\n")
    assert roots.resolve("Qwen/Tiny-4B") == older
    assert open_checkpoint(roots.resolve("Qwen/Tiny-4B"), roots=roots.bases).weight_bytes == 2


def test_a_snapshot_of_the_hub_s_cache_opens_by_its_path(root: Path, tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "elsewhere", "Qwen", "Tiny", "0123")
    roots = ModelRoots([root])
    for path in (snapshot, snapshot.parent.parent):
        checkpoint = open_checkpoint(roots.find(str(path)), roots=roots.bases)
        assert (checkpoint.weight_bytes, checkpoint.name) == (2, "models--Qwen--Tiny")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(make_file(tmp_path / "config.json", b"{}"))
    with pytest.raises(FileError, match="leaves the model folders"):
        open_checkpoint(snapshot, roots=roots.bases)


@pytest.mark.parametrize("parent", ["LLM", "comfyui/LLM", "comfyui/llm"])
def test_a_folder_of_language_models_in_a_root_is_a_root(root: Path, parent: str) -> None:
    folder = make_model(root / parent / "Qwen3-4B")
    inner = make_model(root / parent / "Qwen" / "Qwen3-8B")
    roots = ModelRoots([root])
    assert [entry.name for entry in roots.list()] == ["Qwen/Qwen3-8B", "Qwen3-4B"]
    assert roots.resolve("Qwen3-4B") == folder
    assert roots.resolve("Qwen/Qwen3-8B") == inner
    if parent == "LLM":
        assert roots.resolve("LLM/Qwen3-4B") == folder
    make_model(root / "Qwen3-4B")
    assert [entry.name for entry in roots.list()] == ["Qwen3-4B", "Qwen/Qwen3-8B", f"Qwen3-4B [{Path(parent).name}]"]


def test_symlinks_in_a_circle_end(root: Path) -> None:
    make_model(root / "Qwen")
    (root / "self").symlink_to("self")
    (root / "up").symlink_to(".")
    (root / "org").mkdir()
    (root / "org" / "up").symlink_to("..")
    assert names(root) == ["Qwen"]
    with pytest.raises(ModelError, match="there is no model 'self'"):
        ModelRoots([root]).resolve("self")


def test_a_name_that_cannot_be_printed_is_not_offered(root: Path) -> None:
    make_model(root / "Qwen")
    for raw in (b"bad\xff", b"new\nline"):
        folder = os.fsencode(root) + b"/" + raw
        make_file(Path(os.fsdecode(folder)) / "config.json")
    assert names(root) == ["Qwen"]


def test_an_unknown_name_tells_what_there_is(root: Path) -> None:
    with pytest.raises(ModelError, match="the model folders are empty"):
        ModelRoots([root]).resolve("Qwen3-0.6B")
    for name in ("Qwen3-0.6B", "Qwen3-4B", "Other"):
        make_model(root / name)
    with pytest.raises(ModelError, match=r"there is no model 'Qwen3-0\.6'; there are 3, such as 'Qwen3-0\.6B'"):
        ModelRoots([root]).resolve("Qwen3-0.6")
    make_file(root / "x.gguf")
    with pytest.raises(ModelError, match=r"'x\.gguf' is there but is not a model"):
        ModelRoots([root]).resolve("x.gguf")


def test_find_takes_names_and_paths(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(root / "Qwen")
    elsewhere = make_model(tmp_path / "elsewhere")
    roots = ModelRoots([root])
    assert roots.find("Qwen") == model
    assert roots.find(elsewhere) == elsewhere
    assert roots.find(str(elsewhere / "model.safetensors")) == elsewhere / "model.safetensors"
    monkeypatch.chdir(tmp_path)
    assert roots.find("elsewhere") == Path("elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert roots.find("~/elsewhere") == elsewhere


@pytest.mark.parametrize(
    "text", ["", "a\0b", "absent", "./absent", "x" * 5000, "~nobody-of-this-name/x", "a" * 1_000_000]
)
def test_find_refuses_what_is_neither(root: Path, text: str) -> None:
    make_model(root / "Qwen")
    with pytest.raises(
        (FileError, ModelError), match=r"is neither a model name nor a path|there is no model"
    ) as caught:
        ModelRoots([root]).find(text)
    assert len(str(caught.value)) < 400


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(
        st.sampled_from(["..", ".", "", "Qwen", "link", "org", "outside", "~", "\\", "\0", "é"]), max_size=5
    ),
    lead=st.sampled_from(["", "/"]),
)
def test_no_name_leads_out_of_the_roots(tmp_path: Path, root: Path, parts: list[str], lead: str) -> None:
    if not (root / "link").is_symlink():
        make_model(root / "Qwen")
        make_model(tmp_path / "outside" / "Qwen")
        (root / "link").symlink_to(tmp_path / "outside")
    try:
        found = ModelRoots([root]).resolve(lead + "/".join(parts))
    except (FileError, ModelError):
        return
    assert found == root / "Qwen"
