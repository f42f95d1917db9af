"""What int8 and int4 cost the demo writer, on a part of what `python -m training.quality` measures."""

from __future__ import annotations

from pathlib import Path

from onedesk.service.config import load_config
from onedesk.training.quality import Form, measure

IDEAS = 24
# How much larger the perplexity may get.
INT8, INT4 = 0.005, 0.06


def test_int8_costs_half_a_percent_of_perplexity_at_most_and_int4_six(repository: Path) -> None:
    forms = (Form("none"), Form("int8"), Form("int4"))
    rows = list(measure(repository / "models" / "onedesk-demo-writer", IDEAS, 77, load_config(None), forms))
    plain, eight, four = rows
    assert plain.format == "BF16"
    assert plain.change == 0
    assert plain.perplexity < 2  # it knows its answers: what quantizing breaks would show
    assert eight.format == "int8"
    assert abs(eight.change) <= INT8
    assert set(four.format.split("+")) == {"int4-g128", "int8"}
    assert abs(four.change) <= INT4
    assert four.weight_bytes < eight.weight_bytes < plain.weight_bytes
    assert {row.tokens for row in rows} == {plain.tokens}
    assert plain.tokens > 800
