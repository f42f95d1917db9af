"""`onedesk doctor --check`: five equal runs pass; a difference names the layer or the lease."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_kernels import keep_kernels
from onedesk.service.api import OpenModel
from onedesk.service.cli.check_model import check_model
from onedesk.service.cli.examine import Check
from onedesk.service.config import Config
from onedesk.service.engine.runner import Runner
from onedesk.service.kernels.cpu.cpu_kernels import CpuKernels
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.names import ModelRoots
from tiny_qwen3 import write_tiny_qwen3

NAMES = ["opened", "weights", "states", "texts", "guard zones", "giving way", "operators", "int8", "int4"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "tiny", tokenizer=False)


def checks(model: Path, cache: Path) -> dict[str, Check]:
    return {check.name: check for check in check_model(str(model), Config(tree=cache), ModelRoots([]), device="cpu")}


def failures(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.status == "failure"]


def test_a_sound_model_passes_every_check(tmp_path):
    model = write_tiny_qwen3(tmp_path / "tiny")
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    keep_kernels(tmp_path / "cache")
    command = [
        sys.executable,
        "-m",
        "onedesk.service",
        "doctor",
        "--check",
        str(model),
        "--config",
        str(config),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"]) == (0, True), document
    assert [check["name"] for check in document["checks"]] == NAMES
    assert {check["status"] for check in document["checks"]} == {"ok"}


def test_unopenable_model_is_one_failure(tmp_path):
    command = [sys.executable, "-m", "onedesk.service", "doctor", "--check", str(tmp_path / "none"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"]) == (1, False)
    assert [(check["name"], check["status"]) for check in document["checks"]] == [("opened", "failure")]
    assert "none" in document["checks"][0]["detail"]


def patch_after(monkeypatch: pytest.MonkeyPatch, layer: int, from_call: int, spoil) -> None:
    """Run `spoil(gate and up weight, result)` at every gate of that layer from the n-th on, counted from 1."""
    right, calls = CpuKernels.norm_gate_up, {"n": 0}

    def wrong(
        self: CpuKernels, x: torch.Tensor, norm: object, gate_up: torch.Tensor, *buffers: torch.Tensor
    ) -> torch.Tensor:
        gated = right(self, x, norm, gate_up, *buffers)  # type: ignore[arg-type]
        first = calls.setdefault(id(gate_up), len(calls) - 1)
        if first == layer:
            calls["n"] += 1
            if calls["n"] >= from_call:
                spoil(gate_up, gated)
        return gated

    monkeypatch.setattr(CpuKernels, "norm_gate_up", wrong)
    monkeypatch.setattr(
        CpuKernels, "run_captured", ReferenceKernels.run_captured
    )  # a recorded step would not call it again


def test_a_layer_that_computes_otherwise_once_is_named(model, tmp_path, monkeypatch):
    patch_after(monkeypatch, 2, 30, lambda _, gated: gated.add_(1e-3))
    found = checks(model, tmp_path)
    assert found["weights"].status == found["guard zones"].status == "ok"
    assert "first behind layer 2" in found["states"].detail
    assert "states" in failures(found)


def test_overwritten_weight_is_named_with_layer(model, tmp_path, monkeypatch):
    patch_after(monkeypatch, 1, 40, lambda weight, _: weight[3, 5:6].add_(0.5))
    found = checks(model, tmp_path)
    assert found["weights"].detail.startswith("model.layers.1.mlp.gate_proj.weight changed while it wrote")
    assert "first behind layer 1" in found["states"].detail
    assert {"weights", "states"} <= set(failures(found))


def test_write_outside_lease_names_the_lease(model, tmp_path, monkeypatch):
    right = Runner.decode

    def wrong(self: Runner, *arguments: Any) -> torch.Tensor:
        last = self.kv.values[3]
        ctypes.memset(last.data_ptr() + last.nbytes, 0x77, 4)
        return right(self, *arguments)

    monkeypatch.setattr(Runner, "decode", wrong)
    found = checks(model, tmp_path)
    assert failures(found) == ["guard zones"]
    assert found["guard zones"].detail.startswith("run 1: the guard zone after tiny's kv lease was overwritten")


def test_file_with_changing_bytes_is_named(model, tmp_path, monkeypatch):
    file = model / "model.safetensors"
    place = open_checkpoint(model).tensors["model.layers.3.self_attn.o_proj.weight"]
    times = file.stat()
    right = OpenModel.give_way

    def rot(self: OpenModel):
        with file.open("r+b") as stream:
            stream.seek(place.start + 40)
            stream.write(b"\x3f\x3f")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        return right(self)

    monkeypatch.setattr(OpenModel, "give_way", rot)
    found = checks(model, tmp_path)
    assert found["weights"].detail.startswith("model.layers.3.self_attn.o_proj.weight changed when it was read again")
    assert "first behind layer 3" in found["states"].detail
    assert "run 4 differs" in found["states"].detail
