"""Decoders that read pictures against transformers: positions of three axes, rows of pictures, taps, and what is
written after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.engine.session import Opening, Session, draw_blueprint, open_session
from onedesk.service.kernels.forward_batch import ForwardBatch
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.positions import PicturePositions, PictureSpan, expand, turns_of
from pictures import drawn, pillow
from published import change_tensors
from tiny_vision import END, IMAGE, SEEING, START, Oracle, turn_experts, write_seeing

CPU = torch.device("cpu")
CONTEXT = 320
STEPS = 8
GRIDS = {"6x10": [(6, 10)], "10x6": [(10, 6)], "16x16": [(16, 16)], "two": [(6, 10), (10, 4)]}


class Pair:
    """Our session and transformers' model over one checkpoint."""

    def __init__(self, folder: Path, cache: Path, quant: str = "none") -> None:
        pool = Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))
        blueprint = replace(draw_blueprint(open_checkpoint(folder), CPU, CONTEXT, quant), sequences=2)
        self.session: Session = open_session("test", blueprint, Opening(pool, cache))
        self.session.settle()
        self.config: Any = blueprint.config
        self.oracle = Oracle(folder)
        self.patch: int = self.oracle.processor.patch_size

    def prompt(self, grids: list[tuple[int, int]]) -> tuple[list[int], PicturePositions, dict[str, torch.Tensor]]:
        """Text before, between and after pictures of these grids; transformers' inputs for it."""
        text = torch.randint(3, 490, (60,), generator=torch.Generator().manual_seed(len(grids))).tolist()
        ids = text[:9]
        for number in range(len(grids)):
            ids += [START, IMAGE, END, *text[10 * number + 10 : 10 * number + 17]]
        images = [pillow(drawn(grid[1] * self.patch, grid[0] * self.patch, seed)) for seed, grid in enumerate(grids)]
        inputs = self.oracle.inputs(images)
        assert inputs["image_grid_thw"][:, 1:].tolist() == [list(grid) for grid in grids]
        ids, positions = expand(ids, IMAGE, [(height // 2, width // 2) for height, width in grids])
        kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
        return ids, positions, inputs | {"input_ids": torch.tensor([ids]), "mm_token_type_ids": kinds}

    def pictures(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """[1 + taps, rows, hidden] of each picture, by transformers' tower: ours is compared with it in
        test_tower.py.
        """
        output = self.oracle.tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        layers = torch.stack([output.pooler_output, *getattr(output, "deepstack_features", [])])
        return list(layers.split((inputs["image_grid_thw"].prod(1) // 4).tolist(), 1))

    def read(
        self, kv: Any, ids: list[int], positions: PicturePositions, rows_of: list[torch.Tensor], size: int
    ) -> torch.Tensor:
        """Scores of every position, in chunks of `size`."""
        runner, found = self.session.runner, []
        for at in range(0, len(ids), size):
            piece = ids[at : at + size]
            chunk, rows = runner.chunk.fill(kv, piece, before=ids[:at])
            rows = self.turned(rows, positions, at, at + len(piece))
            rows.pictures = [
                (place, rows_of[number][:, own]) for number, place, own in positions.within(at, at + len(piece))
            ]
            state = runner.network.forward(chunk, rows, runner.kv, runner.scratch).clone()
            kv.advance(len(piece))
            found += [runner.network.logits(row[None], runner.scratch)[0].clone() for row in state]
        return torch.stack(found)

    def turned(self, rows: ForwardBatch, positions: PicturePositions, first: int, last: int) -> ForwardBatch:
        rotary = self.rotary
        key_block = self.config.indexer.ratio if self.config.indexer else 1
        turns = turns_of(positions, first, last, rotary.positions, key_block)
        rotary.turn_axes(turns.axes)
        return replace(rows, turns=turns.turns, first_turns=turns.first_turns)

    @property
    def rotary(self) -> Any:
        mixers = (getattr(block.mixer, "layer", block.mixer) for block in self.session.runner.network.blocks)
        return next(mixer.heads.rotary for mixer in mixers if hasattr(mixer.heads, "rotary"))

    def step(self, kv: Any, token: int, delta: int) -> torch.Tensor:
        """Scores after one more token, by a decode step."""
        runner = self.session.runner
        longest = runner.buffers.fill([kv], [token])
        rows = runner.buffers._steps[1]
        rows.turns = torch.tensor([longest - 1 + delta], dtype=torch.int32)
        rows.longest = longest
        state = runner.network.forward(torch.tensor([token]), replace(rows), runner.kv, runner.scratch)
        rows.turns = None
        kv.advance(1)
        return runner.network.logits(state, runner.scratch)[0].clone()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", params=sorted(SEEING))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Pair]:
    found = Pair(write_seeing(tmp_path_factory.mktemp("model") / request.param, request.param), cache)
    yield found
    found.session.release()


@torch.inference_mode()
def test_text_alone_equals_transformers(pair: Pair):
    ids = torch.randint(3, 490, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    wanted = pair.oracle.model(torch.tensor([ids])).logits[0]
    with pair.session.runner.kv.open(len(ids)) as kv:
        found = pair.read(kv, ids, PicturePositions(()), [], 64)
    assert wanted.abs().max() > 1
    assert (found - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("name", GRIDS)
@torch.inference_mode()
def test_scores_and_greedy_ids_equal_transformers(pair: Pair, name: str):
    ids, positions, inputs = pair.prompt(GRIDS[name])
    places, delta = pair.oracle.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    assert torch.equal(positions.axes(0, len(ids)), places[:, 0])
    assert positions.delta == int(delta)
    wanted = pair.oracle.model(**inputs).logits[0]
    written = pair.oracle.model.generate(**inputs, max_new_tokens=STEPS, do_sample=False, eos_token_id=None)[
        0, len(ids) :
    ]
    rows_of = pair.pictures(inputs)
    assert wanted.abs().max() > 1
    for size in (len(ids), 13):
        with pair.session.runner.kv.open(len(ids) + STEPS) as kv:
            scores = pair.read(kv, ids, positions, rows_of, size)
            assert (scores - wanted).abs().max() <= 1e-4, f"chunks of {size}"
            last, found = scores[-1], []
            for _ in range(STEPS):
                found.append(int(last.argmax()))
                last = pair.step(kv, found[-1], positions.delta)
        assert found == written.tolist(), f"chunks of {size}"


@torch.inference_mode()
def test_pictures_in_another_order_say_something_else(pair: Pair):
    ids, positions, inputs = pair.prompt([(6, 10), (6, 10)])
    rows_of = pair.pictures(inputs)
    found = []
    for order in (rows_of, rows_of[::-1]):
        with pair.session.runner.kv.open(len(ids)) as kv:
            found.append(pair.read(kv, ids, positions, list(order), len(ids))[-1])
    assert (found[0] - found[1]).abs().max() > 1e-3


@torch.inference_mode()
def by_columns_and_by_rows(tmp_path: Path, cache: Path, quant: str) -> list[torch.Tensor]:
    """Scores by the same weights, stored in both ways."""
    ids, found = list(range(3, 40)), []
    for name in ("columns", "rows"):
        folder = write_seeing(tmp_path / name, "qwen3_vl_moe")
        if name == "rows":
            change_tensors(folder, turn_experts)
        pair = Pair(folder, cache, quant)
        with pair.session.runner.kv.open(len(ids)) as kv:
            found.append(pair.read(kv, ids, PicturePositions(()), [], len(ids)))
        pair.session.release()
    return found


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_column_stored_experts_are_transposed_on_quantizing(tmp_path: Path, cache: Path, quant: str):
    assert torch.equal(*by_columns_and_by_rows(tmp_path, cache, quant))


spans = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6)), max_size=4)


@settings(max_examples=100, deadline=None)
@given(spans, st.integers(1, 9), st.integers(0, 12))
def test_chunks_are_turned_as_the_whole_is(pieces: list[tuple[int, int, int]], size: int, tail: int):
    ids: list[int] = []
    for text, _, _ in pieces:
        ids += [*range(10, 10 + text), IMAGE]
    ids, positions = expand([*ids, *range(10, 10 + tail)], IMAGE, [(height, width) for _, height, width in pieces])
    whole = positions.axes(0, len(ids))
    assert [row for row, token in enumerate(ids) if token == IMAGE] == [
        row for span in positions.spans for row in range(span.first, span.end)
    ]
    for first in range(0, len(ids), size):
        last = min(first + size, len(ids))
        turns = turns_of(positions, first, last, 1000, 4)
        assert torch.equal(turns.axes[:, turns.turns.long() - 1000], whole[:, first:last])
        starts = torch.arange(first, last) // 4 * 4
        assert torch.equal(turns.axes[:, turns.first_turns.long() - 1000], whole[:, starts])
        seen = [(number, own) for number, _, own in positions.within(first, last)]
        assert sum(own.stop - own.start for _, own in seen) == sum(token == IMAGE for token in ids[first:last])
    assert (whole[:, -1:] == len(ids) - 1 + positions.delta).all() or not tail


def test_counts_of_image_tokens_and_pictures_must_agree():
    assert expand([1, IMAGE, 2], IMAGE, [(2, 3)])[0] == [1, *[IMAGE] * 6, 2]
    for sizes in ([], [(1, 1), (1, 1)]):
        with pytest.raises(ValueError, match=r"1 (image tokens|runs of image tokens), but (0|2) pictures"):
            expand([1, IMAGE, 2], IMAGE, sizes)
    with pytest.raises(ValueError, match="within one that ends at 6"):
        PicturePositions((PictureSpan(0, 2, 3), PictureSpan(5, 1, 1)))
