"""The truth of other machines, replayed from their files, and of this one."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from onedesk.service.errors import FileError, RequestError
from onedesk.service.memory.budget import GIB, MIB, MemorySettings, make_budget
from onedesk.service.memory.meminfo import read_faults, read_meminfo, read_pressure, read_psutil, read_vmstat
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import DeviceFigures, Truth, read_truth

MACHINES = Path(__file__).parent / "machines"
KIB = 1024


def replay(machine: str, device: str = "cpu", figures: DeviceFigures | None = None) -> Truth:
    def probe(asked: str) -> DeviceFigures:
        assert asked == device
        assert figures is not None
        return figures

    return read_truth(device, proc=MACHINES / machine / "proc", cgroup=MACHINES / machine / "cgroup", probe=probe)


def test_spark_counts_what_the_page_cache_hides():
    """cudaMemGetInfo says 2.8 GiB, the page cache holds 49 GiB: 52 GiB are available, and a 24 GiB model fits."""
    figures = DeviceFigures(integrated=True, free=2936012 * KIB, total=127611699 * KIB, reserved=0, allocated=0)
    truth = replay("spark", "cuda", figures)
    assert truth.available == 52 * GIB
    assert truth.total == 127611699 * KIB
    assert truth.integrated
    assert truth.device_free == truth.mem_free == 2936012 * KIB
    assert truth.page_cache == (51380224 + 412304 - 286720) * KIB
    assert truth.psi_some_avg10 == 1.25
    assert truth.cgroup_limit is None
    assert truth.rule == "MemAvailable"
    budget = make_budget(truth, MemorySettings())
    assert budget.limit == int(52 * GIB * 0.70)
    assert budget.kept_back == int(budget.limit * 0.05)
    assert budget.spendable > 24 * GIB


def test_spark_plan_needs_no_device():
    figures = DeviceFigures(integrated=True, free=2936012 * KIB, total=127611699 * KIB, reserved=0, allocated=0)
    alone, asked = replay("spark"), replay("spark", "cuda:0", figures)
    assert alone.available == asked.available
    assert make_budget(alone, MemorySettings()) == make_budget(asked, MemorySettings())
    assert alone.device_free is None


def test_spark_with_huge_pages_follows_the_vendors_rule():
    figures = DeviceFigures(integrated=True, free=2936012 * KIB, total=127611699 * KIB, reserved=0, allocated=0)
    truth = replay("spark_hugepages", "cuda", figures)
    assert truth.available == 30720 * 2 * MIB == 60 * GIB
    assert truth.swap_free == 0
    assert truth.host_available == 19 * GIB
    assert truth.rule == "HugePages"
    assert make_budget(truth, MemorySettings()).limit == int(60 * GIB * 0.70)


def test_jetson_without_psi_and_with_cgroup_v1_unlimited():
    figures = DeviceFigures(integrated=True, free=21233664 * KIB, total=64349620 * KIB, reserved=0, allocated=0)
    truth = replay("jetson", "cuda", figures)
    assert truth.available == 48234496 * KIB == 46 * GIB
    assert truth.psi_some_avg10 is None
    assert truth.cgroup_limit is None
    assert truth.swap_free == 32174804 * KIB
    assert make_budget(truth, MemorySettings()).limit == int(46 * GIB * 0.70)


def test_discrete_gpu_counts_torch_cache():
    figures = DeviceFigures(integrated=False, free=14 * GIB, total=24 * GIB, reserved=8 * GIB, allocated=5 * GIB)
    truth = replay("discrete", "cuda:1", figures)
    assert truth.available == 14 * GIB + 3 * GIB
    assert truth.total == 24 * GIB
    assert not truth.integrated
    assert truth.device_free == 14 * GIB
    assert truth.host_available == 48 * GIB
    assert truth.rule == "device"
    assert make_budget(truth, MemorySettings()).limit == int(17 * GIB * 0.70)


def test_container_v1_limit_below_what_the_host_has():
    truth = replay("container_v1")
    assert truth.cgroup_limit == 16 * GIB
    assert truth.available == 16 * GIB - 9 * GIB + 5 * GIB
    assert truth.rule == "cgroup"
    assert make_budget(truth, MemorySettings()).limit == int(12 * GIB * 0.70)


def test_container_v2_uses_tightest_ancestor():
    truth = replay("container_v2")
    assert truth.cgroup_limit == 8 * GIB
    assert truth.available == 8 * GIB - 6 * GIB + 1 * GIB
    assert make_budget(truth, MemorySettings()).limit == int(3 * GIB * 0.70)


def test_container_limit_binds_the_huge_page_rule_too(tmp_path: Path):
    shutil.copytree(MACHINES / "container_v1", tmp_path / "machine")
    meminfo = tmp_path / "machine" / "proc" / "meminfo"
    text = meminfo.read_text()
    meminfo.write_text(
        text.replace("HugePages_Total:       0", "HugePages_Total:    8192").replace(
            "HugePages_Free:        0", "HugePages_Free:    8192"
        )
    )
    truth = read_truth(proc=tmp_path / "machine" / "proc", cgroup=tmp_path / "machine" / "cgroup")
    assert truth.available == 12 * GIB
    assert truth.rule == "cgroup"


def test_a_discrete_gpu_is_not_bound_by_the_container():
    figures = DeviceFigures(integrated=False, free=20 * GIB, total=24 * GIB, reserved=0, allocated=0)
    assert replay("container_v2", "cuda", figures).available == 20 * GIB


def test_without_memavailable_counts_free_and_cache(tmp_path: Path):
    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 300 kB\nBuffers: 50 kB\nShmem: 40 kB\n"
    )
    truth = read_truth(proc=tmp_path, cgroup=tmp_path)
    assert truth.available == 410 * KIB


@pytest.mark.parametrize("text", ["", "hello\n", "MemTotal 5 kB\n", "MemTotal: many kB\n"])
def test_a_file_that_is_no_meminfo_is_refused(tmp_path: Path, text: str):
    (tmp_path / "meminfo").write_text(text)
    with pytest.raises(FileError, match="no MemTotal"):
        read_truth(proc=tmp_path, cgroup=tmp_path)


def test_a_folder_without_meminfo_is_refused(tmp_path: Path):
    with pytest.raises(FileError, match="meminfo cannot be read"):
        read_truth(proc=tmp_path, cgroup=tmp_path)


@pytest.mark.parametrize("device", ["", "tpu", "cuda:", "cuda:x", "cpu:1", "CPU", "cuda:1234"])
def test_an_unknown_device_is_refused(device: str):
    with pytest.raises(RequestError, match="use cpu, cuda or cuda:N"):
        read_truth(device)
    with pytest.raises(RequestError, match="use cpu, cuda or cuda:N"):
        Pool(device, MemorySettings(), read_truth)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(RequestError, match=r"device is 'cuda:99', but torch sees \d+ CUDA devices here"):
        read_truth("cuda:99")


def test_this_machine_agrees_with_psutil():
    before, truth, after = psutil.virtual_memory(), read_truth(), psutil.virtual_memory()
    assert truth.total == before.total
    if truth.rule == "MemAvailable":
        slack = 512 * MIB  # other processes live here too
        assert (
            min(before.available, after.available) - slack
            <= truth.available
            <= max(before.available, after.available) + slack
        )
    assert 0 < truth.available <= truth.total
    assert truth.device_free is None


def test_psutil_stands_in_where_there_is_no_proc():
    ours, theirs = read_meminfo(Path("/proc")), read_psutil()
    assert theirs["MemTotal"] == ours["MemTotal"]
    assert theirs["SwapFree"] == ours["SwapFree"]
    assert 0 < theirs["MemAvailable"] <= theirs["MemTotal"]


def test_faults_count_the_pages_that_are_touched():
    tensor = torch.empty(8 * MIB, dtype=torch.uint8)
    before = read_faults()
    fresh = mmap.mmap(-1, 4 * MIB)  # from the system, not from a heap that other tests have left roomy
    fresh.write(b"x" * (4 * MIB))
    gone = read_faults().since(before)
    assert gone.minor >= 1
    assert gone.major >= 0
    assert tensor.numel() == 8 * MIB


def test_vmstat_and_pressure_of_a_replayed_spark():
    proc = MACHINES / "spark" / "proc"
    assert read_vmstat(proc) == {
        "pgfault": 99120331,
        "pgmajfault": 20417,
        "pswpin": 0,
        "pswpout": 12,
        "workingset_refault_anon": 3,
        "workingset_refault_file": 812004,
        "compact_stall": 771,
        "oom_kill": 0,
    }
    pressure = read_pressure(proc)
    assert pressure is not None
    assert (pressure.some_avg10, pressure.some_avg60, pressure.full_avg10) == (1.25, 0.4, 0.5)
    assert read_vmstat(proc / "nowhere") == {}
    assert read_pressure(proc / "nowhere") is None


def test_this_kernel_has_the_counters_that_stages_report():
    assert {"pgfault", "pgmajfault"} <= read_vmstat(Path("/proc")).keys()
