"""The sampling settings that `onedesk bench decode` measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import Sampling

GREEDY = "greedy"
# Complete settings, so that no checkpoint or family adds its own. `card` is what Qwen's model cards recommend for
# answers without reasoning; the others add the penalties that the families use, or what else costs a step something.
SAMPLINGS: Mapping[str, Sampling] = {
    GREEDY: Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0),
    "card": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0, seed=1),
    "card+presence": Sampling(0.7, 20, 0.8, 0.0, 1.5, 0.0, 1.0, seed=1),
    "card+repetition": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.1, seed=1),
    "card+bias": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0, seed=1, logit_bias={7: 1.0}),
    "card+logprobs": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0, seed=1),
    "card+schema": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0, seed=1),
}
# What else their requests ask for. No measurement ends the document of the schema, which needs a tokenizer.
ASKED: Mapping[str, Mapping[str, Any]] = {
    "card+logprobs": {"logprobs": 5},
    "card+schema": {
        "json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 100000}',
        "thinking": "off",
    },
}
