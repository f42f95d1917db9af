"""Each line of the examination: right when all is right, and a failure or warning with what to do when it is not."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from onedesk.service import config as config_module
from onedesk.service.cli import examine as examination
from onedesk.service.cli.examine import Check, examine
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.memory.meminfo import read_meminfo
from onedesk.service.setup.tree import Desk, Tree
from tiny_qwen3 import write_tiny_qwen3

PACKAGE = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_shipped_models() -> None:
    """The fixture `tree` of this file leaves the checkout's toys out itself."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A whole installed tree with the model `tiny` and a ComfyUI folder that the pack is linked into."""
    monkeypatch.setattr(config_module, "package_folder", lambda: tmp_path)  # without the checkout's toy models
    tree = Tree(tmp_path / "dgx local")
    tree.make()
    write_tiny_qwen3(tree.models / "tiny")
    tree.settings.write_text("", encoding="utf-8")
    (tree.comfyui / "custom_nodes").mkdir(parents=True)
    (tree.comfyui / "custom_nodes" / "onedesk").symlink_to(PACKAGE, target_is_directory=True)
    return tree


def checks(tree: Tree, device: str = "auto") -> dict[str, Check]:
    return {check.name: check for check in examine(tree.settings, device=device)}


def test_a_whole_installation_is_ok(tree):
    found = checks(tree)
    wanted = [
        "python",
        "packages",
        "configuration",
        "tree",
        "model folder",
        "cache",
        "torch",
        "device",
        "kernels",
        "memory",
        "mmap memory",
        "model tiny",
        "comfyui",
    ]
    assert list(found) == wanted
    assert [check.name for check in found.values() if check.status == "failure"] == []
    for name in ("python", "packages", "configuration", "tree", "model folder", "torch", "model tiny", "comfyui"):
        assert (found[name].status, found[name].fix) == ("ok", "")
    assert torch.__version__ in found["torch"].detail
    assert found["mmap memory"].detail.startswith("host: ")
    assert "mincore" in found["mmap memory"].detail


def test_every_warning_and_failure_says_what_to_do(tree, monkeypatch):
    monkeypatch.setattr(examination, "NEEDED", ("safetensors", "onedesk-lacks-this"))
    monkeypatch.setattr(examination, "OLDEST_PYTHON", (4, 0))
    monkeypatch.setattr(examination, "LITTLE_DISK", 1 << 80)
    (tree.comfyui / "custom_nodes" / "onedesk").unlink()
    tree.logs.rmdir()
    found = checks(tree)
    status = {name: check.status for name, check in found.items()}
    assert {name: status[name] for name in ("python", "packages", "cache", "tree", "comfyui")} == {
        "python": "failure",
        "packages": "failure",
        "cache": "warning",
        "tree": "warning",
        "comfyui": "failure",
    }
    assert "onedesk-lacks-this" in found["packages"].fix
    assert "cache/logs" in found["tree"].detail
    assert all(check.fix for check in found.values() if check.status != "ok")


def test_a_link_to_another_copy_is_told(tree, tmp_path):
    pack = tree.comfyui / "custom_nodes" / "onedesk"
    pack.unlink()
    other = tmp_path / "other"
    other.mkdir()
    pack.symlink_to(other)
    found = checks(tree)["comfyui"]
    assert (found.status, str(other) in found.detail) == ("warning", True)


def test_a_comfyui_that_was_there_before_is_looked_at(tree, tmp_path):
    theirs = tmp_path / "theirs"
    tree.comfyui.rename(theirs)
    tree.save_desk(Desk(str(theirs), sys.executable, made=False))
    assert checks(tree)["comfyui"].detail == f"{theirs} sees this pack"
    (theirs / "custom_nodes" / "onedesk").unlink()
    assert checks(tree)["comfyui"].status == "failure"
    theirs.rename(tmp_path / "moved")
    found = checks(tree)["comfyui"]
    assert (found.status, found.detail) == ("warning", f"{theirs} is gone")


def test_a_wrong_configuration_is_reported_with_its_reason(tree):
    tree.settings.write_text("[memory]\nfloor = 'much'\n", encoding="utf-8")
    last = examine(tree.settings, device="auto")[-1]
    assert (last.name, last.status) == ("configuration", "failure")
    assert "'much' is not a size" in last.detail


def test_settings_that_this_machine_cannot_meet_are_a_failure(tree):
    tree.settings.write_text("[memory]\nfloor = '900TiB'\n", encoding="utf-8")
    found = checks(tree)
    assert found["memory"].status == "failure"
    assert "floor" in found["memory"].detail


def test_a_missing_folder_fails_and_an_empty_one_warns(tree):
    tree.settings.write_text("[models]\nroots = ['lost']\n", encoding="utf-8")
    found = checks(tree)
    assert (found["model folder"].status, found["models"].status) == ("failure", "warning")


def test_a_broken_model_is_a_warning_with_its_reason(tree):
    (tree.models / "tiny" / "config.json").write_text("{", encoding="utf-8")
    found = checks(tree)["model tiny"]
    assert found.status == "warning"
    assert "config.json is not JSON" in found.detail
    assert "download it again" in found.detail
    assert "take the folder away" in found.fix


def test_configured_engines_are_checked_but_not_started(tree):
    (tree.prefix / "x.gguf").write_bytes(bytes(1000))
    entries = """
    [peers.right]
    kind = "llama-server"
    model = "x.gguf"
    memory = "1GiB"
    command = ["true"]
    [peers.gone]
    kind = "vllm"
    model = "models"
    memory = "1GiB"
    command = ["no-such-engine"]
    [peers.other]
    kind = "openai"
    url = "nonsense"
    """
    tree.settings.write_text(tree.settings.read_text() + entries)
    found = [check for check in examine(tree.settings, device="cpu") if check.name == "engine"]
    assert [check.status for check in found] == ["ok", "warning", "warning"]
    assert "true with x.gguf, 1000 B of weights within 1 GiB" in found[0].detail
    assert "there is no program 'no-such-engine'; install it" in found[1].detail
    assert "url in [peers.other] in onedesk.toml is not an address of a server" in found[2].detail
    assert found[2].fix == "correct [peers.other] in onedesk.toml, or take it out"


def test_a_toy_is_called_a_toy(tree):
    write_tiny_qwen3(tree.models / "onedesk-demo-writer")
    assert "a toy" in checks(tree)["model onedesk-demo-writer"].detail


def test_no_torch_is_a_failure(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = checks(tree)
    assert found["torch"].status == "failure"
    assert list(found)[-1] == "torch"


def test_a_gpu_that_torch_does_not_see_is_a_warning(tree, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(examination.shutil, "which", lambda name: "/usr/bin/" + name)
    found = checks(tree)["device"]
    assert found.status == "warning"
    assert "falls back to the CPU" in found.detail


def test_a_gpu_is_named_with_the_kind_of_its_memory(monkeypatch):
    properties = namedtuple("Properties", "name major minor is_integrated")("GB10", 12, 1, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = list(examination._device(examination.Config(), "auto"))
    assert found == [Check("device", "ok", "computes on the GPU: GB10, sm_121, integrated, one memory with the CPU")]


def test_cuda_that_is_asked_for_and_absent_is_a_failure(tree, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = checks(tree, "cuda")
    assert found["device"].status == "failure"
    assert "no CUDA device" in found["device"].detail


def test_no_compiler_is_a_warning(tree, monkeypatch):
    plain = ReferenceKernels()
    plain.reason = "plain torch: no C compiler (cc, gcc or clang) was found"
    monkeypatch.setattr("onedesk.service.kernels.choose.choose_kernels", lambda device, weights, cache: plain)
    found = checks(tree)["kernels"]
    assert (found.status, found.detail) == ("warning", plain.reason)
    assert "gcc" in found.fix
    plain.reason = (
        "plain torch: the kernels could not be compiled: Permission denied in the cache folder; make it writable"
    )
    assert checks(tree)["kernels"].fix == "correct what the line names; until then decode is slow"


def test_little_memory_is_a_warning(tree, monkeypatch):
    monkeypatch.setattr(examination, "LITTLE_MEMORY", read_meminfo(Path("/proc"))["MemTotal"] * 2)
    found = checks(tree, "cpu")["memory"]
    assert (found.status, found.fix) == ("warning", "end other programs, or choose a smaller model and context")


def test_without_a_tree_the_checkout_is_examined(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    found = {check.name: check for check in examine(None, device="cpu")}
    assert found["tree"].status == "warning"
    assert found["comfyui"].status == "ok"
