"""The folder that conversions are measured with: many shards, hardly anything on the disk, and a checkpoint that
opens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from onedesk.lab.conversion import main, write_large
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.model.families import read_family
from onedesk.service.model.weights import plan_weights
from onedesk.service.quant.formats import CHOICES


def test_it_opens_and_takes_no_room(tmp_path: Path) -> None:
    write_large(tmp_path / "large", 200_000_000)
    family, config, checkpoint = read_family(open_checkpoint(tmp_path / "large"))
    plan = plan_weights(family.destinations(config), checkpoint, CHOICES["int4"])
    shards = sorted((tmp_path / "large").glob("*.safetensors"))
    assert (config.layers, len(shards)) == (3, 5)
    assert plan.nbytes < checkpoint.weight_bytes / 3
    assert 150e6 < checkpoint.weight_bytes < sum(shard.stat().st_size for shard in shards)
    assert sum(shard.stat().st_blocks for shard in shards) * 512 < 20e6


def test_a_quantization_that_is_not_made_is_wrong_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--quant", "fp8"])
