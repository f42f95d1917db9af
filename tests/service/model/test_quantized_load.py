"""Weights that are turned into int8 or int4 on their way from the file: the same as turned as a whole, in the memory
that was stated.
"""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.engine import session
from onedesk.service.engine.session import Blueprint, Opening, draw_blueprint, open_session
from onedesk.service.errors import MemoryFull, ModelError
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader import chunks
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.quant.formats import INT8, int4
from onedesk.service.quant.quantize_weights import quantize
from onedesk.service.quant.weight import QuantizedWeight, Weight
from published import CASES, write_published
from safetensors.torch import load_file, save_file
from tiny_qwen3 import write_tiny_qwen3

CPU = torch.device("cpu")
LAYERS = 3


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled here."""
    monkeypatch.setattr(session, "choose_kernels", lambda *_: ReferenceKernels())


@pytest.fixture(
    params=[{"tied": True}, {"tied": False, "shards": 3, "dtype": "float16"}, {"dtype": "float32"}],
    ids=["tied", "shards", "f32"],
)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options: dict[str, Any] = {"dtype": "bfloat16"} | request.param
    return write_tiny_qwen3(tmp_path / "tiny", layers=LAYERS, hidden=96, intermediate=160, **options)


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", MemorySettings(), lambda: read_truth("cpu"))


def drawn(folder: Path, quant: str, context: int = 64) -> Blueprint:
    return draw_blueprint(open_checkpoint(folder), CPU, context, quant)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_turned(blueprint: Blueprint, tensors: dict[str, Weight], source: dict[str, torch.Tensor]) -> None:
    """Bit for bit what quantizing the merged matrices as a whole gives."""
    for tensor in blueprint.plan.tensors:
        merged = torch.cat([source[s.name] for s in tensor.destination.sources])
        found = tensors[tensor.destination.key]
        if merged.ndim == 1:
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, merged.float())
            continue
        assert isinstance(found, QuantizedWeight)
        wanted = quantize(merged, found.format)
        assert all(torch.equal(one, other) for one, other in zip(found.tensors, wanted.tensors, strict=True)), (
            tensor.destination.key
        )


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("chunk", [1000, 1 << 22])
def test_they_are_what_turning_them_as_a_whole_gives(
    folder: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, quant: str, chunk: int
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk)
    blueprint = drawn(folder, quant)
    lease = pool.lease("test", "weights", blueprint.plan.nbytes)
    arrival = WeightArrival(blueprint.plan, lease, None, None).start()
    arrival.finish()
    assert_turned(blueprint, arrival.tensors, stored(folder))
    assert blueprint.activation == torch.float32
    formats = {t.destination.key: t.held for t in blueprint.plan.tensors}
    assert formats["embedding"] == INT8
    assert formats["0.qkv"] == (INT8 if quant == "int8" else int4())
    assert formats["0.q_norm"] == torch.float32


def test_memory_matches_the_estimate_and_buffers_are_returned(folder: Path, pool: Pool, tmp_path: Path) -> None:
    blueprint = drawn(folder, "int4")
    need = blueprint.need
    assert blueprint.staging_bytes > 0
    peaks: list[int] = []
    opened = open_session("tiny", blueprint, Opening(pool, tmp_path, progress=lambda _: peaks.append(pool.used())))
    opened.settle()
    assert max(peaks) == need.total
    assert pool.used() == need.total - blueprint.staging_bytes == opened.held_bytes()
    assert opened.leases[0].free < 256
    smaller = drawn(folder, "none").need
    assert smaller.weights_of == {"int8": drawn(folder, "int8").need.weights, "int4": need.weights}
    assert need.weights_of == {}
    opened.release()
    assert pool.used() == 0


def test_a_refusal_names_the_form_that_would_fit(tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny", vocab=60_000, hidden=128)
    whole, eight = drawn(folder, "none").need, drawn(folder, "int8").need
    settings = MemorySettings(limit_bytes=int((whole.total + eight.total) / 2 * 1.2 / 0.95))
    small = Pool("cpu", settings, lambda: read_truth("cpu"))
    with pytest.raises(MemoryFull, match=r"What fits: .*int8 \(\S+ \w+ of weights\), or int4 \(\S+ \w+ of weights\)"):
        open_session("tiny", drawn(folder, "none"), Opening(small, tmp_path))
    opened = open_session("tiny", drawn(folder, "int4"), Opening(small, tmp_path))
    opened.settle()
    opened.release()


def test_rows_of_the_embedding_are_there_before_all_of_it(folder: Path, pool: Pool) -> None:
    blueprint = drawn(folder, "int4")
    lease = pool.lease("test", "weights", blueprint.plan.nbytes)
    gate, held = threading.Event(), threading.Event()

    def hold() -> bool:
        held.set()
        assert gate.wait(60)
        return False

    arrival = WeightArrival(blueprint.plan, lease, None, hold).start()
    assert held.wait(60)
    embedding = arrival.tensors["embedding"]
    assert isinstance(embedding, QuantizedWeight)
    arrival.fetch_rows([500, 3, 3, 77])
    wanted = quantize(stored(folder)["model.embed_tokens.weight"], INT8)
    for row in (3, 77, 500):
        assert torch.equal(embedding.data[row], wanted.data[row])
        assert torch.equal(embedding.scales[row], wanted.scales[row])
    assert not embedding.data[4].any()
    gate.set()
    arrival.finish()
    assert_turned(blueprint, arrival.tensors, stored(folder))


def test_a_prompt_is_the_same_during_and_after_loading(folder: Path, pool: Pool, tmp_path: Path) -> None:
    scores = []
    for settled in (False, True):
        opened = open_session("tiny", drawn(folder, "int8"), Opening(pool, tmp_path))
        if settled:
            opened.settle()
        scores.append([one.token for one in opened.runner.logprobs([5, 99, 3, 210, 7])])
        opened.settle()
        opened.release()
    assert scores[0] == scores[1]


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_nan_weights_are_refused_and_memory_is_returned(tmp_path: Path, pool: Pool, quant: str) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny", layers=LAYERS, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][5, 6] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    opened = open_session("tiny", drawn(folder, quant), Opening(pool, tmp_path))
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors: tensor model\.layers\.2\.mlp\.down_proj\.weight has weights that are NaN",
    ):
        opened.settle()
    opened.release()
    assert pool.used() == 0


def test_tensors_without_whole_groups_become_int8_with_one_note(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_qwen3(tmp_path / "tiny", layers=LAYERS, intermediate=100)
    blueprint = drawn(folder, "int4")
    assert {t.destination.key for t in blueprint.plan.tensors if t.held == INT8} == {
        "embedding",
        "0.down",
        "1.down",
        "2.down",
    }
    with caplog.at_level(logging.WARNING):
        arrival = WeightArrival(
            blueprint.plan, pool.lease("test", "weights", blueprint.plan.nbytes), None, None
        ).start()
        arrival.finish()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["3 tensors are held in int8 instead of int4-g128: their columns are no multiple of 32 ([64, 100])"]
    assert_turned(blueprint, arrival.tensors, stored(folder))


def test_tensors_that_are_stored_in_int8_did_not_fall_to_it(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "int8-tensor")
    plan = drawn(write_published(tmp_path / "int8", case)[0], "int4").plan
    assert plan.form == "int8"
    assert plan.note == ""


def test_the_form_and_the_bytes_of_a_pass_are_told(folder: Path) -> None:
    plain, four = drawn(folder, "none"), drawn(folder, "int4")
    kind = json.loads((folder / "config.json").read_text())["torch_dtype"]
    assert plain.plan.form == {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[kind]
    assert set(four.plan.form.split("+")) == {"int4-g128", "int8"}
    held = sum(tensor.nbytes for tensor in four.plan.tensors)
    tied = "head" not in {tensor.destination.key for tensor in four.plan.tensors}
    assert four.pass_bytes == held - (0 if tied else four.plan.tensors[0].nbytes)
