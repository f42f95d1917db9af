"""The form in which a checkpoint's weights are to be held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..loader.checkpoint import Checkpoint
from ..quant.formats import CHOICES
from .spec import Destination
from .weights import WeightPlan, plan_weights


def plan_form(wanted: Callable[[], Iterable[Destination]], checkpoint: Checkpoint, quant: str, cache: Path | None) -> WeightPlan:
    """The plan of `wanted` for the choice `quant`: none, int8 or int4. Raises ModelError."""
    return plan_weights(wanted(), checkpoint, CHOICES.get(quant))
