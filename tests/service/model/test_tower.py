"""Vision towers against transformers, stage by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onedesk.service.errors import Cancelled, ModelError
from onedesk.service.kernels.reference import ReferenceKernels
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.loader.json_files import read_json_object
from onedesk.service.memory.budget import MemorySettings
from onedesk.service.memory.pool import Pool
from onedesk.service.memory.truth import read_truth
from onedesk.service.model.arrival import WeightArrival
from onedesk.service.model.families import read_tower
from onedesk.service.model.tower import Tower, TowerScratch, build, destinations
from onedesk.service.model.vision_config import SEEING as SEEING_FAMILIES
from onedesk.service.model.weights import plan_weights
from onedesk.service.vision.preprocessor import read_preprocessor
from onedesk.service.vision.resize import resize_picture
from pictures import drawn, pillow
from published import change_config, change_tensors
from tiny_vision import SEEING, Oracle, write_seeing

# Patches: narrow and wide (no axis can be taken for the other), and more than the 8 x 8 learned positions.
GRIDS = [(6, 10), (10, 6), (16, 16), (2, 2), (22, 14)]


def pool() -> Pool:
    return Pool("cpu", MemorySettings(floor=0), lambda: read_truth("cpu"))


class Opened:
    """A tower in memory with transformers' beside it."""

    def __init__(self, folder: Path) -> None:
        found = read_tower(open_checkpoint(folder))
        assert found is not None
        self.vision, checkpoint = found
        self.plan = plan_weights(destinations(self.vision.tower), checkpoint)
        self.pool = pool()
        self.lease = self.pool.lease("tower", "weights", self.plan.nbytes, align=256)
        arrival = WeightArrival(self.plan, self.lease, None, None).start()
        arrival.finish()
        self.tower: Tower = build(self.vision.tower, arrival.tensors, ReferenceKernels())
        self.preprocessor = read_preprocessor(
            read_json_object(folder / "preprocessor_config.json", "preprocessor_config.json")
        )
        self.oracle = Oracle(folder)

    def run(self, picture: Any, seen: Any = None, check: Any = lambda: None) -> torch.Tensor:
        shape = self.vision.tower
        count = picture.grid[0] * picture.grid[1]
        lease = self.pool.lease("tower", "scratch", TowerScratch.nbytes(shape, count, torch.float32), align=256)
        out = torch.empty(1 + len(shape.taps), shape.tokens(picture.grid), shape.out)
        try:
            self.tower.run(picture, TowerScratch(lease, shape, count, torch.float32), out, check, seen)
        finally:
            lease.release()
        return out

    def picture(self, grid: tuple[int, int], seed: int = 0) -> tuple[Any, dict[str, torch.Tensor]]:
        patch = self.preprocessor.patch
        drawing = drawn(grid[1] * patch, grid[0] * patch, seed)
        resized = resize_picture(drawing, self.preprocessor)
        assert resized.grid == grid
        return resized, self.oracle.inputs([pillow(drawing)])


@pytest.fixture(scope="module", params=sorted(SEEING))
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(write_seeing(tmp_path_factory.mktemp("seeing") / request.param, request.param))


def test_every_family_with_a_tower_is_here():
    assert set(SEEING) == set(SEEING_FAMILIES)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@torch.inference_mode()
def test_every_stage_equals_transformers(opened: Opened, grid: tuple[int, int]):
    picture, inputs = opened.picture(grid)
    stages: dict[str, torch.Tensor] = {}
    found = opened.run(picture, lambda name, state: stages.update({name: state.clone()}))
    wanted: dict[str, torch.Tensor] = {}
    hooks = [
        block.register_forward_hook(
            lambda _m, _i, output, index=index: wanted.update({f"block {index}": output.clone()})
        )
        for index, block in enumerate(opened.oracle.tower.blocks)
    ]
    hooks.append(
        opened.oracle.tower.blocks[0].register_forward_pre_hook(lambda _m, args: wanted.update(patches=args[0].clone()))
    )
    output = opened.oracle.tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    for hook in hooks:
        hook.remove()
    assert set(stages) == set(wanted)
    for name, state in wanted.items():
        assert (stages[name] - state).abs().max() <= 1e-5 * max(1.0, state.abs().max().item()), name
    merged = [output.pooler_output, *getattr(output, "deepstack_features", [])]
    assert len(found) == len(merged) == 1 + len(opened.vision.tower.taps)
    for place, rows in enumerate(merged):
        assert (found[place] - rows).abs().max() <= 1e-5 * max(1.0, rows.abs().max().item()), f"row {place}"


@torch.inference_mode()
def test_a_picture_beside_another_is_the_same_as_alone(opened: Opened):
    drawings = [opened.picture((6, 10), 1), opened.picture((10, 6), 2)]
    joined = {key: torch.cat([inputs[key] for _, inputs in drawings]) for key in ("pixel_values", "image_grid_thw")}
    output = opened.oracle.tower(joined["pixel_values"], grid_thw=joined["image_grid_thw"]).pooler_output
    found = torch.cat([opened.run(picture)[0] for picture, _ in drawings])
    assert (found - output).abs().max() <= 1e-5 * max(1.0, output.abs().max().item())


@torch.inference_mode()
def test_it_can_be_stopped_within_a_block(opened: Opened):
    picture, _ = opened.picture((16, 16))
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    opened.run(picture, check=count)
    assert calls > 3 * opened.vision.tower.depth

    def stop_at(call: int) -> Any:
        left = iter(range(call - 1))

        def stop() -> None:
            if next(left, None) is None:
                raise Cancelled("stopped")

        return stop

    for call in (1, calls // 2, calls):
        with pytest.raises(Cancelled):
            opened.run(picture, check=stop_at(call))


def test_a_checkpoint_without_its_tower_only_writes(tmp_path: Path):
    folder = write_seeing(tmp_path / "blind", "qwen3_5")

    def blind(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "visual" in name]:
            del tensors[name]

    change_tensors(folder, blind)
    assert read_tower(open_checkpoint(folder)) is None


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3_vl", {"hidden_act": "relu"}, "vision_config.hidden_act = 'relu'"),
        ("qwen3_vl", {"num_position_embeddings": 63}, "a square number"),
        ("qwen3_vl", {"num_heads": 5}, "num_heads = 5"),
        ("qwen3_vl", {"deepstack_visual_indexes": [1, 9]}, r"\[1, 9\]; rising numbers below the depth 4"),
        ("qwen3_vl", {"out_hidden_size": 32}, "out_hidden_size = 32 for a decoder of hidden_size = 64"),
        ("qwen3_vl", {"depth": None}, "vision_config.depth = None"),
        ("qwen2_5_vl", {"window_size": 14}, "window_size below 28 pixels"),
    ],
)
def test_what_a_config_says_wrongly_is_named(tmp_path: Path, family: str, change: dict[str, Any], words: str):
    folder = write_seeing(tmp_path / "model", family)
    config = read_json_object(folder / "config.json", "config.json")
    change_config(folder, vision_config=config["vision_config"] | change)
    with pytest.raises(ModelError, match=words):
        read_tower(open_checkpoint(folder))


def test_a_tower_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path):
    folder = write_seeing(tmp_path / "model", "qwen3_5")
    change_tensors(folder, _drop_bias)
    found = read_tower(open_checkpoint(folder))
    assert found is not None
    with pytest.raises(ModelError, match=r"lacks the tensor blocks.2.attn.proj.bias"):
        plan_weights(destinations(found[0].tower), found[1])


def _drop_bias(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.visual.blocks.2.attn.proj.bias"]


def test_sizes_may_be_lists_and_older_types_are_known(tmp_path: Path):
    folder = write_seeing(tmp_path / "model", "qwen3_vl")
    config = read_json_object(folder / "config.json", "config.json")["vision_config"]
    change_config(folder, vision_config=config | {"patch_size": [16, 16], "model_type": "qwen3_vl"})
    found = read_tower(open_checkpoint(folder))
    assert found is not None
    assert found[0].tower.patch == 16
