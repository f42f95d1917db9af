"""`onedesk doctor --plan`: what it says agrees with what an opening needs, with what was published, and with itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.catalog.composition import compose
from onedesk.service.catalog.forms import WITH_TABLE
from onedesk.service.catalog.known_configs import PUBLISHED
from onedesk.service.catalog.plan import ASSUMED_CAPABILITY, TABLE_CACHE, NodeLoad, PlannedMachine, plan_model
from onedesk.service.catalog.plan_report import plan_table
from onedesk.service.cli import command
from onedesk.service.config import Config
from onedesk.service.console import WIDTH
from onedesk.service.engine.session import draw_blueprint, sketch
from onedesk.service.errors import FileError, ModelError, RequestError
from onedesk.service.loader.checkpoint import Checkpoint, open_checkpoint
from onedesk.service.memory.budget import MemorySettings, Need
from onedesk.service.model.draft import with_draft
from onedesk.service.model.families import family_of, text_config
from published import compressed
from tiny_qwen3 import write_tiny_qwen3

GIB = 1 << 30
SPARK = 121 * GIB
FLASH_NEXT = "Qwen3.8-Flash-Next"


def hollow(folder: Path, name: str, layers: int) -> Checkpoint:
    """The published model `name` in BF16, so many layers of it, with its true header and, instead of weights, a hole
    in the file.
    """
    folder.mkdir()
    config = dict(text_config(PUBLISHED[name])) | {"num_hidden_layers": layers}
    family = family_of(config)
    described, entries, at = family.read_config(config), dict[str, Any](), 0
    if config.get("mtp_num_hidden_layers"):
        described = with_draft(described)
    for wanted in family.destinations(described):
        for source in (wanted.joined,) if wanted.joined else wanted.sources:
            end = at + 2 * torch.Size(source.shape).numel()
            entries[source.name] = {"dtype": "BF16", "shape": list(source.in_file), "data_offsets": [at, end]}
            at = end
    text = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def rows_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["format"]: row for row in document["forms"]}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen3-0.6B", 28),
        ("Qwen3-8B", 36),
        ("Qwen3-30B-A3B", 8),
        ("Qwen3.5-4B", 8),
        ("Qwen3.5-35B-A3B", 8),
        (FLASH_NEXT, 8),
    ],
)
@pytest.mark.parametrize(
    ("title", "quant"), [("BF16", "none"), ("INT8, made on load", "int8"), ("INT4, made on load", "int4")]
)
def test_a_plan_is_what_an_opening_states(tmp_path: Path, name: str, layers: int, title: str, quant: str):
    checkpoint = hollow(tmp_path / name, name, layers)
    need: Need = draw_blueprint(checkpoint, torch.device("cpu"), 4096, quant).need
    rows = rows_of(plan_model(str(tmp_path / name), Config(), memory=SPARK, context=4096, device="cpu"))
    row = rows[title] if title in rows else rows[f"{title}; table in its file"]
    sizes = row["bytes"]
    assert sizes["weights"] == pytest.approx(need.weights, rel=0.002)
    assert sizes["kv"] == pytest.approx(need.kv, rel=0.03)
    assert sum(sizes[part] for part in ("weights", "kv", "scratch")) == pytest.approx(need.total, rel=0.03)
    assert row["opens"] is row["fits"] is True


@pytest.mark.parametrize("name", ["Qwen3.5-4B", FLASH_NEXT])
def test_a_gpu_plan_counts_the_draft_layer_as_opening_does(tmp_path: Path, name: str):
    checkpoint = hollow(tmp_path / name, name, 8)
    blueprint = draw_blueprint(checkpoint, torch.device("cuda"), 4096)
    rows = rows_of(plan_model(str(tmp_path / name), Config(), memory=SPARK, context=4096, device="cuda"))
    sizes = next(row["bytes"] for title, row in rows.items() if title.startswith("BF16"))
    assert sizes["draft"] == pytest.approx(blueprint.draft_bytes, rel=0.002)
    assert sizes["draft"] > 0
    assert sum(sizes[part] for part in ("weights", "kv", "scratch")) == pytest.approx(blueprint.need.total, rel=0.03)


def test_flash_next_in_four_bits_fits_next_to_image_models():
    document = plan_model(FLASH_NEXT, Config(), memory=SPARK, images=24 * GIB)
    assert (document["model"], document["family"], document["memory"], document["images"]) == (
        FLASH_NEXT,
        "qwen4_exp",
        SPARK,
        24 * GIB,
    )
    assert document["parameters"] == 179_999_981_424
    rows = rows_of(document)
    assert len(rows) == 2 * len(WITH_TABLE) + 2 * 7
    for title in ("NVFP4 experts, FP8 table", "NVFP4 experts, MXFP8 layers, 4-bit table", "INT4, made on load"):
        row = rows[f"{title}; table in its file"]
        assert row["fits"] is True
        assert row["bytes"]["table"] == TABLE_CACHE
        assert 68 * GIB < row["bytes"]["weights"] + row["bytes"]["kv"] + row["bytes"]["scratch"] < 81 * GIB
        assert row["context"] >= 131_072
        assert row["needs"] + 24 * GIB <= SPARK
        assert "set [memory] limit = 0." in row["why"]
    assert rows["NVFP4 experts, 4-bit table; table in memory"]["bytes"]["table"] == pytest.approx(
        26.82 * GIB, rel=0.001
    )
    assert all(not row["fits"] for title, row in rows.items() if title.startswith(("BF16", "FP8")))
    assert all(
        row["engine"] == ("llama-server" if title.startswith("GGUF") else row["engine"]) for title, row in rows.items()
    )
    small, large = (rows[f"INT4, made {how}; table in its file"] for how in ("once of the FP8 files", "on load"))
    assert small["bytes"]["weights"] == large["bytes"]["weights"]
    assert (
        small["bytes"]["file"]
        == rows["FP8 experts and table; table in its file"]["bytes"]["file"]
        < large["bytes"]["file"] * 0.52
    )
    lacking = rows["FP8 experts and table; table in its file"]["why"]
    assert lacking.startswith("needs 153")
    assert "96.5 GiB can be had: 57 GiB lacking" in lacking


def test_without_images_the_configured_limit_holds():
    title = "NVFP4 experts, FP8 table; table in its file"
    row = rows_of(plan_model(FLASH_NEXT, Config(), memory=SPARK))[title]
    assert row["fits"] is False
    assert "set [memory] limit = 0.79, now 0.70" in row["why"]
    raised = rows_of(plan_model(FLASH_NEXT, Config(memory={"limit": 0.79}), memory=SPARK))[title]
    assert raised["fits"] is True
    assert raised["context"] >= 4096


def test_several_machines_divide_what_is_divisible():
    alone = rows_of(plan_model("Qwen3-30B-A3B", Config(), memory=SPARK, images=0))
    shared = rows_of(plan_model("Qwen3-30B-A3B", Config(), memory=SPARK, images=0, nodes=2))
    assert set(shared) == {title for title in alone if "made" not in title}
    for title, row in shared.items():
        assert row["engine"] == "vllm"
        assert row["bytes"]["weights"] == pytest.approx(alone[title]["bytes"]["weights"] / 2, rel=0.01)
        assert row["kv_per_1k"] == alone[title]["kv_per_1k"] // 2
    # two key heads: four machines keep each of them twice
    four = rows_of(plan_model(FLASH_NEXT, Config(), memory=SPARK, nodes=4))["BF16; table in its file"]
    two = rows_of(plan_model(FLASH_NEXT, Config(), memory=SPARK, nodes=2))["BF16; table in its file"]
    assert four["kv_per_1k"] == two["kv_per_1k"]
    with pytest.raises(RequestError, match="32 attention heads do not divide"):
        plan_model("Qwen3-30B-A3B", Config(), memory=SPARK, nodes=5)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PUBLISHED)),
    memory=st.integers(GIB, 400 * GIB),
    share=st.floats(0, 1),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_a_context_that_is_named_fits_and_a_longer_one_does_not(name: str, memory: int, share: float, device: str):
    images = int(memory * share)
    document = plan_model(name, Config(), memory=memory, images=images, device=device)
    network = compose(PUBLISHED[name])
    machine = PlannedMachine(memory, images, MemorySettings(), device)
    for row in document["forms"]:
        if row["fits"]:
            assert 0 < row["needs"] <= document["room"] <= memory - images
            assert row["images"] >= images
            assert row["context"] <= network.config.max_position
        assert len(row["why"].splitlines()) == 1
    first = document["forms"][0]
    reached, config = first["context"], with_draft(network.config) if first["bytes"]["draft"] else network.config
    blueprint = sketch(network.module, config, torch.device(device), ASSUMED_CAPABILITY)
    load = NodeLoad(first["bytes"]["weights"], first["bytes"]["table"], blueprint)
    if reached:
        assert load.wanted(reached, 0.2) <= machine.room + 1
    if reached < network.config.max_position:
        assert load.wanted(reached + 256, 0.2) > machine.room


def test_a_folder_with_nothing_but_its_config_is_planned(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[FLASH_NEXT]))
    document = plan_model(str(tmp_path), Config(), memory=SPARK, images=0)
    assert document["parameters"] == 179_999_981_424
    assert {row["format"].partition(";")[0] for row in document["forms"]} == {form.title for form in WITH_TABLE}


def test_a_folder_that_is_quantized_is_planned_as_what_it_is(tmp_path: Path):
    config = dict(PUBLISHED["Qwen3-8B"])
    config["quantization_config"] = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (row,) = plan_model(str(tmp_path), Config(), memory=SPARK)["forms"]
    assert row["format"] == "compressed-tensors pack-quantized"
    # embedding and head in BF16, everything else 4 bits and a factor for 128
    assert row["bytes"]["weights"] == pytest.approx(2 * 1.2447e9 + 6.946e9 * 4.125 / 8, rel=0.002)


def test_what_cannot_be_planned_is_told_with_the_figures(tmp_path: Path):
    with pytest.raises(
        ModelError, match=r"known are Qwen3-0\.6B, .*Qwen3\.8-Flash-Next; a folder with the model's config.json"
    ):
        plan_model("nope", Config())
    with pytest.raises(ModelError, match="the name of a model is empty"):
        plan_model("", Config())
    with pytest.raises(FileError, match=rf"the folder '{tmp_path.name}' has no config\.json"):
        plan_model(str(tmp_path), Config())
    with pytest.raises(RequestError, match="--memory is 0 B; name what the machine can give"):
        plan_model("Qwen3-8B", Config(), memory=0)
    with pytest.raises(RequestError, match="--images is 25 GiB of 24 GiB"):
        plan_model("Qwen3-8B", Config(), memory=24 * GIB, images=25 * GIB)
    with pytest.raises(RequestError, match="context is 50000, but the model's config allows 40960"):
        plan_model("Qwen3-8B", Config(), memory=SPARK, context=50_000)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="num_hidden_layers = None"):
        plan_model(str(tmp_path), Config())


def test_a_config_that_the_family_refuses_is_refused_by_its_key(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"] | {"num_experts_per_tok": 999}))
    with pytest.raises(ModelError, match="num_experts_per_tok = 999"):
        plan_model(str(tmp_path), Config(), memory=SPARK)


def test_the_command_answers_as_a_table_or_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    common = ["doctor", "--config", str(config), "--plan", FLASH_NEXT, "--memory", "121GiB", "--images", "24GiB"]
    assert command.main([*common, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["forms"][0]) >= {"format", "bytes", "fits", "context", "why"}
    assert set(document["forms"][0]["bytes"]) >= {"weights", "table", "kv", "scratch"}
    assert command.main(common) == 0
    table = capsys.readouterr().out
    assert table.startswith("Qwen3.8-Flash-Next (qwen4_exp): 180.0 B parameters, 6.7 B active; by kind: ")
    assert max(map(len, table.splitlines())) <= WIDTH
    first = next(row for row in document["forms"] if row["fits"])
    assert f"{first['format']}\n  yes" in table
    assert table.strip() == plan_table(document)
    for wrong in (
        ["--memory", "1GiB"],
        ["--images", "0"],
        ["--nodes", "2"],
        ["--plan", "x", "--check", "y"],
        ["--plan", "x", "--memory", "3X"],
    ):
        assert command.main(["doctor", "--config", str(config), *wrong]) == 2
        assert "onedesk:" in capsys.readouterr().err


def test_a_model_of_the_folders_is_found_by_its_name(tmp_path: Path):
    write_tiny_qwen3(tmp_path / "models" / "mine")
    document = plan_model("mine", Config(model_roots=(tmp_path / "models",)), memory=GIB)
    assert (document["model"], document["parameters"]) == ("mine", 230_208)


def test_several_machines_get_commands_for_the_first_fit():
    document = plan_model("Qwen3-30B-A3B", Config(), memory=40 * GIB, nodes=2)
    words = document["cluster"]
    best = next(row for row in document["forms"] if row["fits"])
    assert words["format"] == best["format"]
    assert words["bytes"]["budget"] > best["needs"]  # vLLM's own processes come on top
    assert (words["bytes"]["kv"], words["context"]) == (best["bytes"]["kv"], best["context"])
    assert [argv[argv.index("--node-rank") + 1] for argv in words["native"]] == ["0", "1"]
    assert plan_table(document).count("--node-rank") == 2
    assert "cluster" not in plan_model("Qwen3-30B-A3B", Config(), memory=40 * GIB)
    assert plan_model("Qwen3-30B-A3B", Config(), memory=4 * GIB, nodes=2)["cluster"] is None
