"""Impossible budgets are refused with their figures, by the registry and by the command,
before anything is allocated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from onedesk.service.cli import command as cli
from onedesk.service.config import Config, load_config
from onedesk.service.errors import FileError, MemoryFull, RequestError
from onedesk.service.memory.truth import read_truth
from onedesk.service.registry import REGISTRY, Registry
from tiny_qwen3 import write_tiny_qwen3

TOTAL = read_truth("cpu").total
GIB = 1 << 30
SIZE = r"[0-9.]+ (B|KiB|MiB|GiB)"
BAD = {
    "nothing": ("limit = 0", r"memory limit is 0%; use 10% to 95%"),
    "nothing, in bytes": (
        "limit_bytes = 0",
        r"memory limit_bytes is 0; use a whole number of bytes from 1 to 1125899906842624, or leave it out",
    ),
    "over all": ("limit = 1.5", r"memory limit is 150%; use 10% to 95%"),
    "over all, in bytes": (
        f"limit_bytes = {TOTAL + GIB}",
        rf"memory limit_bytes is {SIZE}, more than the machine's {SIZE}; use less than that",
    ),
    "into what the system holds": (
        f"limit_bytes = {TOTAL}",
        rf"memory limit_bytes is {SIZE}, but of {SIZE} the system and other programs hold {SIZE} "
        rf"and the floor keeps {SIZE}; "
        rf"use at most {SIZE}",
    ),
    "a floor above the total": (
        f"floor = {TOTAL + 1}",
        rf"memory floor is {SIZE}, but the machine has {SIZE} in all; use a floor below that",
    ),
}


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "tiny", tokenizer=False)


def config_of(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "onedesk.toml"
    path.write_text(f"[memory]\n{line}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BAD)
def test_registry_refuses_bad_budget_until_corrected(registry, folder, tmp_path, name):
    line, message = BAD[name]
    registry.configure(load_config(config_of(tmp_path, line)))
    with pytest.raises(RequestError, match=f"^{message}$"):
        registry.open(folder, context=64, device="cpu")
    assert registry.models() == []
    registry.configure(Config(memory={"floor": 0}))
    assert registry.open(folder, context=64, device="cpu").held_bytes() > 0


@pytest.mark.parametrize("command", [["memory"], ["generate", "--ids", "1,2", "--model", "tiny"], ["doctor"]])
@pytest.mark.parametrize("name", BAD)
def test_the_command_refuses_it_with_the_same_words(folder, tmp_path, capsys, command, name):
    line, message = BAD[name]
    command = [str(folder) if word == "tiny" else word for word in command]
    status = cli.main([*command, "--device", "cpu", "--config", str(config_of(tmp_path, line)), "--json"])
    document = json.loads(capsys.readouterr().out)
    if command[0] == "doctor":
        found = {check["name"]: check for check in document["checks"]}["memory"]
        assert (status, found["status"]) == (1, "failure")
        assert re.search(message, found["detail"])
    else:
        assert (status, document["error"]["type"]) == (1, "RequestError")
        assert re.fullmatch(message, document["error"]["message"])
    assert REGISTRY.models() == []


@pytest.mark.parametrize(
    "line", ['limit = "half"', "limit = true", 'floor = "much"', "floor = -1", "limit = nan", "lmit = 0.5"]
)
def test_wrong_value_or_unknown_key_is_refused_by_name(tmp_path, line):
    with pytest.raises(FileError, match=line.split()[0]):
        load_config(config_of(tmp_path, line))


def test_tight_limit_refuses_model_not_budget(registry, folder):
    registry.configure(Config(memory={"limit_bytes": 1 << 20, "floor": 0}))
    with pytest.raises(
        MemoryFull, match=r"tiny needs .* \(weights .*, KV .*, scratch .*\), but .* can be had: limit 1 MiB"
    ):
        registry.open(folder, context=64, device="cpu")
    assert registry.pool("cpu").used() == 0


def test_a_context_that_fits_is_named_and_fits(registry, folder):
    registry.configure(Config(memory={"limit_bytes": 10 << 20, "floor": 0}))
    with pytest.raises(MemoryFull, match=r"What fits: a context of ([0-9]+) \(asked: 4096\)") as refusal:
        registry.open(folder, context=4096, device="cpu")
    named = re.search(r"a context of ([0-9]+)", str(refusal.value))
    assert named is not None
    assert registry.open(folder, context=int(named[1]), device="cpu").loaded


def test_budget_leaves_the_rest(registry):
    registry.configure(Config(memory={"limit_bytes": 2 * GIB, "kept_back": 0.1}))
    budget = registry.pool("cpu").budget
    assert (budget.limit, budget.kept_back, budget.spendable) == (2 * GIB, int(0.2 * GIB), 2 * GIB - int(0.2 * GIB))
