"""Whatever the JSON files of a model folder hold, it is a row with its reason: nothing else is raised, and little
memory is taken.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import folder_faults as faults
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.api import open_model
from onedesk.service.catalog.inventory import default_model, model_rows, model_table
from onedesk.service.catalog.plan import plan_model
from onedesk.service.config import Config
from onedesk.service.errors import OnedeskError
from onedesk.service.loader.names import ModelRoots
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from tiny_families import FAMILIES, write_family
from tiny_models import write_language_model

MIB = 1 << 20
MOST = 48 * MIB  # of Python's objects, whatever the folder holds: 3 MB were measured for a whole one


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole folder of each family."""
    root = tmp_path_factory.mktemp("whole")
    found = {family: write_family(root / family, family) for family in FAMILIES}
    found["spoken"] = write_language_model(root / "spoken")
    return found


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roots") / "bad"


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


def put(source: Path, bad: Path, changes: dict[str, bytes]) -> None:
    """Make `bad` of the files of `source` (those of tensors are links) and of `changes`."""
    shutil.rmtree(bad, ignore_errors=True)
    bad.mkdir()
    for path in source.iterdir():
        if path.name not in changes:
            os.link(path, bad / path.name)
    for name, content in changes.items():
        (bad / name).write_bytes(content)


def survives(bad: Path, pool: Pool) -> dict[str, Any]:
    """The row of the folder, after every door was tried. Raises what is no OnedeskError."""
    config, roots = Config(model_roots=(bad.parent,)), ModelRoots([bad.parent])
    tracemalloc.start()
    try:
        (row,) = model_rows(config, None, device="cpu", context=None)
        json.dumps(row).encode()
        model_table([row]).encode()
        default_model(config)
        _tried(lambda: plan_model("bad", config, memory=64 << 30))
        _tried(
            lambda: open_model(
                "bad", pool=pool, roots=roots, device="cpu", load=False, kernel_cache=bad.parent / "cache"
            ).close()
        )
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert row["reason"]
    assert len(row["reason"]) < 2000
    return row


def _tried(action: Callable[[], object]) -> None:
    with suppress(OnedeskError):
        action()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.randoms(use_true_random=False))
def test_any_value_anywhere_in_a_file_is_a_row(whole: dict[str, Path], bad: Path, pool: Pool, draw: random.Random):
    source = whole[draw.choice(sorted(whole))]
    name = draw.choice(
        (faults.CONFIG, faults.CONFIG, faults.GENERATION, faults.INDEX, faults.HF_QUANT, faults.PREPROCESSOR)
    )
    document = faults.document_of(source, name)
    if name == faults.CONFIG and draw.random() < 0.5:
        document = document | {"quantization_config": draw.choice(faults.QUANTIZATIONS)}
    put(source, bad, {name: faults.changed(document, draw)})
    survives(bad, pool)


@pytest.mark.parametrize("family", ["qwen3", "qwen4_exp"])
def test_every_field_with_a_value_of_each_kind_is_a_row(whole: dict[str, Path], bad: Path, pool: Pool, family: str):
    """Each field with two values, which go round from field to field, so that each value is met and each field has
    other ones.
    """
    document = faults.document_of(whole[family], faults.CONFIG)
    values = [*faults.NUMBERS, *faults.OTHERS]
    for place, key in enumerate((*document, *faults.ADDED)):
        for turn in range(2):
            value = values[(2 * place + turn) % len(values)]
            text = json.dumps(document | {key: faults.MARK}).replace(json.dumps(faults.MARK), value)
            put(whole[family], bad, {faults.CONFIG: text.encode()})
            survives(bad, pool)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts": 200_000}),
        ("qwen3_moe", {"num_experts": 800_000}),
        ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 1000}),
        ("qwen4_exp", {"split_ngram_parts": 1_000_000, "ngram_vocab_size_base": 2_000_000_000}),
        ("qwen4_exp", {"split_ngram_parts": 2**31 - 1}),
        ("qwen4_exp", {"ple_layer_ids": [1, 2, 3, 4], "heads_per_ngram": 64, "ngram_vocab_size_base": 2**31 - 1}),
        ("qwen3_5", {"num_hidden_layers": 2**31 - 1}),
        ("qwen3_5", {"num_hidden_layers": 2**31 - 1, "layer_types": None}),
        ("qwen3", {"num_hidden_layers": 2**31 - 1}),
        ("qwen3_next", {"linear_conv_kernel_dim": 2**31 - 1, "vocab_size": 2**31 - 1}),
    ],
)
def test_huge_config_sizes_are_refused_with_little_memory(
    whole: dict[str, Path], bad: Path, pool: Pool, family: str, changes: dict[str, Any]
):
    document = faults.document_of(whole[family], faults.CONFIG) | changes
    put(whole[family], bad, {faults.CONFIG: json.dumps(document).encode()})
    assert not survives(bad, pool)["opens"]


def test_layers_that_draft_without_number_are_not_counted(whole: dict[str, Path], bad: Path, pool: Pool):
    document = faults.document_of(whole["qwen4_exp"], faults.CONFIG) | {"mtp_num_hidden_layers": 2**31 - 1}
    put(whole["qwen4_exp"], bad, {faults.CONFIG: json.dumps(document).encode()})
    assert survives(bad, pool)["opens"]  # the checkpoint has none of them


def test_a_broken_folder_leaves_the_others_listed(whole: dict[str, Path], bad: Path):
    text = json.dumps(faults.document_of(whole["qwen3"], faults.CONFIG) | {"rms_norm_eps": faults.MARK})
    put(whole["qwen3"], bad, {faults.CONFIG: text.replace(json.dumps(faults.MARK), "1" + "0" * 400).encode()})
    shutil.copytree(whole["qwen3"], bad.parent / "good")
    try:
        rows = {
            row["name"]: row for row in model_rows(Config(model_roots=(bad.parent,)), None, device="cpu", context=None)
        }
    finally:
        shutil.rmtree(bad.parent / "good")
    assert rows["good"]["opens"]
    assert not rows["bad"]["opens"]
    assert (
        rows["bad"]["reason"] == "config.json has a whole number of 401 digits at 'rms_norm_eps'; at most 64 are read"
    )
