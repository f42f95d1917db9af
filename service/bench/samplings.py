"""The sampling settings that `onedesk bench decode` measures."""

from __future__ import annotations

from collections.abc import Mapping

from ..core import Sampling

GREEDY = "greedy"
# Complete settings, so that no checkpoint or family adds its own. `card` is what Qwen's model cards recommend for
# answers without reasoning; the others add the penalties that the families use.
SAMPLINGS: Mapping[str, Sampling] = {
    GREEDY: Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0),
    "card": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.0, seed=1),
    "card+presence": Sampling(0.7, 20, 0.8, 0.0, 1.5, 0.0, 1.0, seed=1),
    "card+repetition": Sampling(0.7, 20, 0.8, 0.0, 0.0, 0.0, 1.1, seed=1),
}
