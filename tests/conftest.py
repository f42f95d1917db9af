"""Shared fixtures: the real ComfyUI, started once per session, and tiny models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from comfyui import BoundComfy, Comfy
from kept_kernels import building_once
from onedesk.service.config import load_config
from onedesk.service.errors import PeerError
from onedesk.service.kernels.cpu import compile
from onedesk.service.registry import REGISTRY
from onedesk.service.setup.tree import Tree
from tiny_models import ENCODER, write_image_models, write_language_model

REPOSITORY = Path(__file__).resolve().parents[1]
TINY_WRITER = "tiny-writer"
TINY_WRITER_HIDDEN = 64


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--comfyui", type=Path, default=None, help="folder of a ComfyUI whose requirements this Python has"
    )


@pytest.fixture(autouse=True, scope="session")
def no_sudden_end() -> Iterator[None]:
    """A test that ends the process of the tests at once fails instead; forked children may."""
    real, tests = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() == tests:
            raise RuntimeError(f"os._exit({status}) in the process of the tests")
        real(status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", refused)
        yield


@pytest.fixture(autouse=True, scope="session")
def hubs_may_be_asked() -> Iterator[None]:
    """install.sh --test runs with the variables of an installation, in which no hub is asked; `pull` in the tests asks
    a stand-in on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def kernels_built_once() -> Iterator[None]:
    """A compile into a new cache, in this process, copies an existing library. test_cpu_library.py has its own sources
    and compiles.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_build", building_once(compile._build))
        yield


@pytest.fixture(autouse=True, scope="module")
def claims_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Memory claims of this user's other processes do not reach the tests, nor the tests' claims them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield


@pytest.fixture(autouse=True, scope="module")
def registry_as_new() -> Iterator[None]:
    """No test file leaves models, pools or settings to the next one: the command's tests run with budgets of 1 MiB."""
    yield
    REGISTRY.close()
    REGISTRY.configure(load_config(None))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def tiny_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 checkpoint (a folder) that writes printable ASCII and never ends by itself. Read only: copy
    it to change it.
    """
    return write_language_model(tmp_path_factory.mktemp("checkpoint") / TINY_WRITER, hidden=TINY_WRITER_HIDDEN)


@pytest.fixture(scope="session")
def comfyui_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the real ComfyUI: next to this Python's environment, as install.sh makes it, or from --comfyui."""
    folder: Path = request.config.getoption("--comfyui") or Path(sys.prefix).parent / "ComfyUI"
    if not (folder / "main.py").is_file():
        pytest.fail(
            f"no ComfyUI in {folder}: run ./install.sh --test, or name one with pytest --comfyui FOLDER", pytrace=False
        )
    return folder.resolve()


@pytest.fixture(scope="session")
def comfyui_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base directory for ComfyUI with only this pack, the nodes of the tests, and tiny models of every kind that is
    needed.

    models/: diffusion_models/tiny_painter_16 and _64, vae/tiny_coder, text_encoders/tiny_encoder (.safetensors),
    llm/tiny-writer.
    """
    base = tmp_path_factory.mktemp("comfyui")
    for name in ("models", "custom_nodes", "input", "output", "user", "temp"):
        (base / name).mkdir()
    (base / "custom_nodes" / "onedesk").symlink_to(REPOSITORY, target_is_directory=True)
    (base / "custom_nodes" / "onedesk_tests").symlink_to(
        REPOSITORY / "tests" / "comfyui_pack", target_is_directory=True
    )
    write_image_models(base / "models", (ENCODER["hidden_size"], TINY_WRITER_HIDDEN))
    write_language_model(base / "models" / "llm" / TINY_WRITER, hidden=TINY_WRITER_HIDDEN)
    return base


@pytest.fixture(scope="session")
def comfyui(comfyui_folder: Path, comfyui_base: Path) -> Iterator[Comfy]:
    """The real ComfyUI with only this pack, on a free port of 127.0.0.1, for the whole session."""
    arguments = [
        "--base-directory",
        str(comfyui_base),
        "--database-url",
        "sqlite:///:memory:",
        "--disable-auto-launch",
        "--disable-api-nodes",
    ]
    arguments += ["--disable-all-custom-nodes", "--whitelist-custom-nodes", "onedesk", "onedesk_tests"]
    arguments += [] if torch.cuda.is_available() else ["--cpu"]
    caches = Tree(comfyui_base).environment()
    process = BoundComfy(
        Path(sys.executable), comfyui_folder, arguments, log=comfyui_base / "comfyui.log", environment=caches
    )
    try:
        process.start()
    except PeerError as reason:
        pytest.fail(f"the real ComfyUI does not start: {reason}", pytrace=False)
    yield Comfy(process, comfyui_base)
    process.stop()
