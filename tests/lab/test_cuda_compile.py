"""Every Triton kernel is launched by a published shape, and what a decode step launches compiles for a DGX Spark,
without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from onedesk.lab import cuda_compile
from onedesk.lab.cuda_compile import DEVICES, SPARK, compiled
from onedesk.lab.cuda_launches import FORMS, SHAPES, KernelVariant, kernels_of_tree, launches_of
from onedesk.service.catalog.known_configs import PUBLISHED
from onedesk.service.config import load_config
from onedesk.service.errors import RequestError


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch):
    """What was compiled stays in the checkout's own cache, as the CPU's kernels do."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(load_config(None).cache / "triton"))


@pytest.fixture(scope="module")
def launches() -> list[KernelVariant]:
    return launches_of(SPARK, DEVICES[SPARK], {"Qwen3-4B": ("bf16", "int4"), "Qwen3.8-Flash-Next": ("experts-int4",)})


def test_no_kernel_of_the_tree_is_left_out(launches: list[KernelVariant]):
    assert {launch.name for launch in launches} == set(kernels_of_tree())


def test_launches_are_those_of_the_device(launches: list[KernelVariant]):
    small = launches_of(86, DEVICES[86], {"Qwen3-4B": ("bf16",)})
    assert not any(launch.options["launch_pdl"] for launch in small)
    steps = [launch for launch in launches if launch.first == "Qwen3-4B bf16, a step of 1" and launch.part == "gemv"]
    assert (
        len(steps) == 4
    )  # queries with keys and values, output, gate with up, down; the head has the columns of the first
    assert all(launch.options["launch_pdl"] and "FORMAT=float" in launch.form for launch in steps)


def test_nothing_of_it_stays_with_triton():
    from triton.runtime.driver import driver

    before = driver._active
    launches = launches_of(SPARK, DEVICES[SPARK], {"Qwen3-0.6B": ("bf16",)})
    assert launches
    assert driver._active is before
    assert not any(SPARK in launch.kernel.device_caches for launch in launches)


def test_what_a_step_launches_compiles_for_a_spark_and_fits(launches: list[KernelVariant]):
    hot = {"attend_step", "attend_positions", "step_states", "join_splits"}
    chosen = [launch for launch in launches if launch.name in hot and launch.first.endswith("a step of 1")]
    several = ("float", "int4")
    chosen += [
        next(launch for launch in launches if launch.name == "gemv" and f"FORMAT={form} " in launch.form)
        for form in several
    ]
    chosen.append(next(launch for launch in launches if launch.name == "skinny"))
    assert hot <= {launch.name for launch in chosen}
    for launch in chosen:
        found = compiled(launch, SPARK)
        assert found.error == ""
        assert 0 <= found.shared <= DEVICES[SPARK].shared
        assert 16 <= found.registers <= 255
        assert found.spilled == 0


def test_what_does_not_compile_is_told_with_its_cause(launches: list[KernelVariant]):
    step = next(launch for launch in launches if launch.name == "attend_step")
    index = next(at for at in step.constants if list(step.signature)[at[0]] == "D")
    broken = compiled(replace(step, constants={**step.constants, index: 100}), SPARK)
    assert "power of 2" in broken.error


def test_what_does_not_fit_fails_the_command(
    launches: list[KernelVariant], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    step = next(launch for launch in launches if launch.name == "attend_step")
    monkeypatch.setattr(cuda_compile, "launches_of", lambda *_: [step])
    monkeypatch.setitem(DEVICES, SPARK, replace(DEVICES[SPARK], shared=4096))
    assert cuda_compile.main(["--shape", "Qwen3-4B", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["archs"][0] | {"seconds": 0} == {
        "arch": SPARK,
        "kernels": 1,
        "forms": 1,
        "compiled": 1,
        "fit": 0,
        "shared": document["rows"][0]["shared"],
        "limit": 4096,
        "spilling": 0,
        "spilled": 0,
        "seconds": 0,
    }
    assert "of 4 KiB shared" in document["failures"][0]
    assert cuda_compile.main(["--shape", "Qwen3-4B", "--part", "gemv"]) == 0
    assert "0 of 0 forms" in capsys.readouterr().out


def test_interpreted_kernels_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("onedesk.lab.cuda_launches.kernels_of_tree", lambda: {"attend_step": object()})
    with pytest.raises(RequestError, match="unset TRITON_INTERPRET"):
        launches_of(SPARK, DEVICES[SPARK], {})


def test_wrong_names_are_wrong_usage(capsys: pytest.CaptureFixture[str]):
    for option, value in (("--arch", "75"), ("--shape", "Qwen9"), ("--part", "gemm")):
        with pytest.raises(SystemExit) as left:
            cuda_compile.main([option, value])
        assert left.value.code == 2
        assert f"{option} is {value}; known are" in capsys.readouterr().err


def test_shapes_and_forms_are_known_ones():
    assert set(SHAPES) <= set(PUBLISHED)
    assert {form for forms in SHAPES.values() for form in forms} == set(FORMS)


def test_registers_are_limited_only_for_tensor_core_kernels(launches: list[KernelVariant]):
    found = {arch: launches_of(arch, DEVICES[arch], {"Qwen3.5-4B": ("bf16",)}) for arch in (80, 90)} | {SPARK: launches}
    limits = {
        arch: {one.options["maxnreg"] for one in every if one.name == "solve_piece"} for arch, every in found.items()
    }
    assert limits[80] == limits[SPARK] == {None}
    assert None not in limits[90]
