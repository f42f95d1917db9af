"""What install.sh finds before it changes anything: on made-up machines, and asked on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from onedesk.service.hub.image_models import read_image_models
from onedesk.service.setup.environment import TORCH, Environment
from onedesk.service.setup.install import MODEL_NAMES, bad_model_name, pull_models
from onedesk.service.setup.steps import Steps
from onedesk.service.setup.survey import Accelerator, find_accelerator, find_comfyuis, survey, torch_specs
from onedesk.service.setup.tree import OFFLINE, Tree

ENDS_WITHIN = 60
SMI = """#!/bin/sh
case $1 in
  --query*) printf 'NVIDIA GB10, 580.95.05\\n' ;;
  *) printf '| NVIDIA-SMI 580.95.05  Driver Version: 580.95.05  CUDA Version: 13.0 |\\n' ;;
esac
"""


def program(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nvidia-smi"
    file.write_text(text)
    file.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def comfyui(folder: Path, *, git: bool = False) -> Path:
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    if git:
        (folder / ".git").mkdir()
    return folder


def test_the_driver_names_gpu_and_cuda(tmp_path: Path) -> None:
    found = find_accelerator(tmp_path, program(tmp_path / "bin", SMI))
    assert found == Accelerator("cuda", "NVIDIA GB10", "580.95.05", "13.0")
    assert str(found) == "NVIDIA GB10 (driver 580.95.05, CUDA 13.0)"


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\n", "not a program"])
def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, text: str) -> None:
    assert find_accelerator(tmp_path, program(tmp_path / "bin", text)) == Accelerator("none")


def test_the_kernel_shows_a_jetson_and_amd(tmp_path: Path) -> None:
    jetson, amd = tmp_path / "jetson", tmp_path / "amd"
    (jetson / "dev").mkdir(parents=True)
    (jetson / "dev" / "nvhost-gpu").touch()
    (jetson / "proc" / "device-tree").mkdir(parents=True)
    (jetson / "proc" / "device-tree" / "model").write_bytes(b"NVIDIA Jetson AGX Orin\0")
    assert find_accelerator(jetson, "") == Accelerator("cuda", "NVIDIA Jetson AGX Orin")
    device = amd / "sys" / "class" / "drm" / "card0" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1002\n")
    assert find_accelerator(amd, "") == Accelerator("none")
    (amd / "dev").mkdir()
    (amd / "dev" / "kfd").touch()
    assert "has not been tried with ROCm" in str(find_accelerator(amd, ""))


def test_each_kind_of_comfyui_is_found_once(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    cloned = comfyui(home / "ComfyUI", git=True)
    by_tool = comfyui(home / "comfy" / "ComfyUI")
    desktop = home / "Documents" / "ComfyUI"
    (desktop / "custom_nodes").mkdir(parents=True)
    in_image = comfyui(root / "opt" / "ComfyUI")
    (root / ".dockerenv").touch()
    (root / "workspace").mkdir()
    (root / "workspace" / "ComfyUI").symlink_to(in_image)
    found = {entry.folder: entry for entry in find_comfyuis(root, home)}
    kinds = {folder: entry.kind for folder, entry in found.items()}
    assert kinds == {cloned: "git", by_tool: "comfy-cli", desktop: "Desktop", in_image: "container"}
    assert [folder for folder, entry in found.items() if entry.reason] == [desktop]
    assert f"clone Onedesk into {desktop / 'custom_nodes'}" in found[desktop].reason


def test_the_build_of_torch_fits_the_machine() -> None:
    spark, none = Accelerator("cuda", "NVIDIA GB10", "580", "13.0"), Accelerator("none")
    assert torch_specs(none, "x86_64", TORCH)[0].startswith(f"{TORCH}+cpu ")
    assert torch_specs(spark, "aarch64", TORCH)[0].startswith(f"{TORCH}+cu130 ")
    for accelerator, machine in ((spark, "x86_64"), (none, "aarch64"), (Accelerator("cuda", "Jetson"), "aarch64")):
        assert torch_specs(accelerator, machine, TORCH) == (TORCH,)


def test_surroundings_that_are_ignored_are_named(tmp_path: Path) -> None:
    variables = {"CONDA_PREFIX": "/opt/conda", "VIRTUAL_ENV": "/venv", "PIP_TARGET": "/x", "PYTHONPATH": "/y"}
    notes = "\n".join(survey(tmp_path / "new", variables, tmp_path).notes)
    for word in ("/opt/conda is active", "/venv is active", "PIP_TARGET, PYTHONPATH set here are ignored"):
        assert word in notes


def test_names_of_models_are_those_that_pull_knows() -> None:
    known = read_image_models()
    assert set(MODEL_NAMES) == {*known, *(name for model in known.values() for name in model.names)}
    assert bad_model_name("Qwen/Qwen3-4B") is None
    for name in ("", "z", "../x", "a/b/c", "-x/y", "https://example.org/a"):
        assert "use z-image-turbo" in str(bad_model_name(name))


def test_models_are_fetched_by_the_command_with_the_network(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    environment = Environment(tree.envs / "onedesk", Steps(tree))
    script = environment.folder / "bin" / "onedesk"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\necho "$* ${{HF_HUB_OFFLINE-unset}}" >>{tmp_path}/asked\ntest "$2" = z-image\n')
    script.chmod(0o755)
    assert "HF_HUB_OFFLINE" in OFFLINE
    failed = pull_models(environment, ["z-image", "qwen-image"])
    assert (tmp_path / "asked").read_text() == "pull z-image unset\npull qwen-image unset\n"
    assert failed == [f"models (qwen-image; go on with: {script} pull qwen-image)"]


def script(repository: Path, home: Path, *words: str) -> list[str]:
    home.mkdir(exist_ok=True)
    return ["bash", str(repository / "install.sh"), "--python", sys.executable, "--prefix", str(home / "desk"), *words]


def test_a_dry_run_shows_the_plan_and_changes_nothing(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    comfyui(home / "ComfyUI", git=True)
    answer = subprocess.run(
        script(repository, home, "--dry-run", "--models", "z-image", "--demo"),
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=ENDS_WITHIN,
    )
    lines = answer.stdout.splitlines()
    assert lines[-1] == "dry run   nothing was changed"
    assert f"found     ComfyUI in {home / 'ComfyUI'} (git): --comfyui {home / 'ComfyUI'} adds Onedesk to it" in lines
    assert "fetch z-image (its size is shown first); draw the demo's picture" in answer.stdout
    assert names(home) == ["ComfyUI"]


def test_a_wrong_model_is_refused_before_anything_is_done(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    answer = subprocess.run(
        script(repository, home, "--models", "nothing"),
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=ENDS_WITHIN,
    )
    assert (answer.returncode, names(home)) == (2, [])
    assert "--models is 'nothing'; use z-image-turbo" in answer.stderr.replace("': use", "'; use")


def test_on_a_terminal_it_asks_before_it_installs(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = script(repository, home)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}
    ) as process:
        os.close(theirs)
        os.write(ours, b"n\n")
        shown = b""
        try:
            while more := os.read(ours, 4096):
                shown += more
        except OSError:  # the terminal is gone with the process
            pass
        assert process.wait(ENDS_WITHIN) == 1
    os.close(ours)
    assert b"Go on? [Y/n]" in shown
    assert b"nothing was changed" in shown
    assert names(home) == []
