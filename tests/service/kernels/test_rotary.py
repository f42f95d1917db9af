"""YaRN's rotary embedding against that of transformers for any parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onedesk.service.errors import ModelError
from onedesk.service.kernels.rotary import turns_per_position
from onedesk.service.model.families import describe
from onedesk.service.model.spec import ConfigReader
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

PARAMETERS = st.fixed_dictionaries(
    {
        "factor": st.floats(1.0, 64.0),
        "original_max_position_embeddings": st.integers(64, 1 << 18),
        "rope_theta": st.sampled_from([1e4, 5e6]),
    },
    optional={
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.5, 4.0),
        "attention_factor": st.floats(0.5, 2.0),
        "mscale": st.floats(0.5, 2.0),
        "mscale_all_dim": st.floats(0.5, 2.0),
        "truncate": st.booleans(),
    },
)


@settings(max_examples=200, deadline=None)
@given(parameters=PARAMETERS, dim=st.sampled_from([8, 32, 64, 128, 256]))
def test_yarn_turns_as_in_transformers(parameters: dict[str, Any], dim: int):
    rope = {"rope_type": "yarn", **parameters}
    config = Qwen3Config(head_dim=dim, max_position_embeddings=1 << 20, rope_parameters=dict(rope))
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    yarn = ConfigReader({"max_position_embeddings": 1 << 20, "rope_parameters": rope}).yarn()
    assert yarn is not None
    torch.testing.assert_close(turns_per_position(dim, rope["rope_theta"], yarn), wanted, rtol=1e-6, atol=1e-12)
    assert yarn.attention == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("stated", "rope", "reach"),
    [
        (40960, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        (131_072, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        (32768, {"factor": 2.5}, 81_920),
        (131_072, {"original_max_position_embeddings": 32768}, 131_072),
        (1 << 30, {"factor": 1e30}, 2**31 - 1),
        (40960, {"rope_type": "default"}, 40960),
    ],
)
def test_a_context_reaches_as_far_as_the_positions_are_stretched(
    key: str, stated: int, rope: dict[str, Any], reach: int
):
    text = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    described = {
        **text,
        "vocab_size": 8,
        "max_position_embeddings": stated,
        key: {"rope_type": "yarn", "rope_theta": 1e6} | rope,
    }
    assert describe(described).max_position == reach
    assert describe(described).rope_theta == 1e6


@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e39, True, "4"])
@pytest.mark.parametrize(
    "key", ["factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "original_max_position_embeddings"]
)
def test_yarn_takes_no_parameter_that_is_no_number_above_0(key: str, value: Any):
    with pytest.raises(ModelError, match=f"config.json has {key} = "):
        ConfigReader({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, key: value}}).yarn()
