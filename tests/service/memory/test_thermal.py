"""Thermal flags from copied kernel files and from a program that answers like nvidia-smi."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from onedesk.service.memory.thermal import Thermal, merge, read_nvidia, read_zones


def add_zone(sys_root: Path, number: int, kind: str, temp: str, trips: dict[str, int]) -> None:
    zone = sys_root / "class" / "thermal" / f"thermal_zone{number}"
    zone.mkdir(parents=True)
    (zone / "type").write_text(kind + "\n")
    (zone / "temp").write_text(temp)
    for index, (name, degrees) in enumerate(trips.items()):
        (zone / f"trip_point_{index}_type").write_text(name + "\n")
        (zone / f"trip_point_{index}_temp").write_text(f"{degrees * 1000}\n")


def test_zones(tmp_path: Path):
    add_zone(tmp_path, 0, "cpu-thermal", "61250\n", {"passive": 50, "critical": 105})
    add_zone(tmp_path, 1, "acpitz", "97000\n", {"hot": 99, "critical": 110})
    add_zone(tmp_path, 2, "broken", "\n", {"critical": 20})
    add_zone(tmp_path, 3, "no-limit", "-5000\n", {"critical": -1})
    assert read_zones(tmp_path) == Thermal(97.0, ("acpitz at 97 of 99 degrees",))


def test_a_machine_without_zones(tmp_path: Path):
    assert read_zones(tmp_path) == Thermal(None)


def smi(folder: Path, answer: str, code: int = 0) -> tuple[str, ...]:
    program = folder / "smi.py"
    asked = "--query-gpu=temperature.gpu,clocks_event_reasons.active"
    said = answer.encode(errors="surrogateescape")
    program.write_text(
        f"import sys\nassert {asked!r} in sys.argv\nsys.stdout.buffer.write({said!r})\nsys.exit({code})\n"
    )
    return sys.executable, str(program)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("61, 0x0000000000000004\n", Thermal(61.0)),
        ("45, 0x0000000000000001\n83, 0x0000000000000040\n", Thermal(83.0, ("GPU 1: hardware thermal slowdown",))),
        (
            "90, 0x00000000000000E8\n",
            Thermal(
                90.0,
                tuple(
                    f"GPU 0: {words}"
                    for words in (
                        "hardware slowdown",
                        "software thermal slowdown",
                        "hardware thermal slowdown",
                        "power brake",
                    )
                ),
            ),
        ),
        ("[N/A], [Not Supported]\n", Thermal(None)),
        ("No devices were found\n", Thermal(None)),
        ("GPU gest\udcf6rt, 0x1\n70, 0x4\n", Thermal(70.0)),  # Latin-1
        ("", Thermal(None)),
    ],
)
def test_nvidia(tmp_path: Path, answer: str, expected: Thermal):
    assert read_nvidia(smi(tmp_path, answer)) == expected


def test_a_failing_or_absent_nvidia_smi(tmp_path: Path):
    assert read_nvidia(smi(tmp_path, "61, 0x4\n", code=9)) == Thermal(None)
    assert read_nvidia((str(tmp_path / "absent"),)) == Thermal(None)


def test_readings_are_merged():
    assert merge(Thermal(None), Thermal(50.0, ("a",)), Thermal(70.0, ("b",))) == Thermal(70.0, ("a", "b"))
    assert merge() == Thermal(None)
