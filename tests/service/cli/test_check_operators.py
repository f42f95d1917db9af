"""Operators are counted where they compute: `meta` stands for an accelerator, since torch dispatches to it on every
machine.
"""

from __future__ import annotations

import torch
from onedesk.service.cli.check_operators import OperatorCounts, check_operators


def on_the_accelerator() -> torch.Tensor:
    return torch.ones(4, device="meta").softmax(0)


def on_both() -> None:
    on_the_accelerator()
    scores = torch.ones(3)
    scores.mul_(2)
    scores.mul_(3)


def test_views_copies_integers_and_scalars_do_not_count() -> None:
    scores, one = torch.ones(4, 2), torch.tensor(1.5)
    with OperatorCounts() as counts:
        scores.view(8)[2:].clone()
        scores.to(torch.float64)
        torch.arange(3) + 1
        one * 2
        one.item()
    assert (counts.host, counts.device) == ({}, {})


def test_a_run_that_stays_on_its_device_is_proved() -> None:
    check = check_operators("meta", on_the_accelerator)
    assert (check.status, check.detail.split(";")[0]) == ("ok", "no operator fell back to the CPU")


def test_what_fell_back_is_named_and_counted() -> None:
    check = check_operators("meta", on_both)
    assert (check.status, "2 operators of torch ran on the CPU and 1 on meta: mul_ (2 times)" in check.detail) == (
        "failure",
        True,
    )
    assert check.fix


def test_on_a_cpu_all_of_them_belong_there() -> None:
    check = check_operators("cpu", on_both)
    assert (check.status, "the model is on the CPU" in check.detail, "2 of torch" in check.detail) == ("ok", True, True)
