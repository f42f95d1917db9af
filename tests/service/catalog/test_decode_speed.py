"""The decode speed to expect: within 15 % of measured runs, from a config as from files, here and elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from kept_kernels import keep_kernels
from onedesk.service.bench import machine_speed as machine_speed_module
from onedesk.service.bench.machine_speed import machine_speed
from onedesk.service.catalog.composition import compose
from onedesk.service.catalog.decode_speed import DecodeSpeed, TokenReads, shown_speed
from onedesk.service.catalog.forms import Form, forms_of
from onedesk.service.catalog.known_configs import PUBLISHED
from onedesk.service.cli import command as cli
from onedesk.service.engine.session import draw_blueprint
from onedesk.service.errors import MemoryFull
from onedesk.service.loader.checkpoint import open_checkpoint
from onedesk.service.memory.read_bandwidth import keep_ceiling, known_ceiling
from tiny_qwen3 import write_tiny_qwen3

H200, ZEN_3 = 4.04e12, 34.6e9  # read bandwidths of the runs in docs/performance.md


def form_named(model: str, title: str) -> tuple[Form, TokenReads]:
    network = compose(PUBLISHED[model])
    form = next(form for form in forms_of(network) if form.title.startswith(title))
    return form, form.token_reads(network)


@pytest.mark.parametrize(
    ("device", "bandwidth", "model", "form", "measured"),
    [
        ("cuda", H200, "Qwen3-4B", "BF16", 437),
        ("cuda", H200, "Qwen3-4B", "INT8", 697),
        ("cuda", H200, "Qwen3-4B", "INT4", 807),
        ("cuda", H200, "Qwen3-0.6B", "BF16", 1758),
        ("cuda", H200, "Qwen3.5-4B", "BF16", 376),
        ("cpu", ZEN_3, "Qwen3-0.6B", "BF16", 25.6),
        ("cpu", ZEN_3, "Qwen3-0.6B", "INT8", 40.0),
        ("cpu", ZEN_3, "Qwen3-0.6B", "INT4", 52.6),
    ],
)
def test_measured_runs_are_expected_within_15_percent(device, bandwidth, model, form, measured):
    _, reads = form_named(model, form)
    assert DecodeSpeed(device, bandwidth).tokens_per_second(reads) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("quant", "title", "bits"), [("none", "BF16", 16), ("int8", "INT8", 8)])
def test_a_config_reads_what_the_opened_model_reads(tmp_path, tied, quant, title, bits):
    folder = write_tiny_qwen3(tmp_path / "tiny", dtype="bfloat16", hidden=256, intermediate=512, tied=tied)
    checkpoint = open_checkpoint(folder)
    network = compose(checkpoint.config)
    reads = next(form for form in forms_of(network) if form.title.startswith(title)).token_reads(network)
    blueprint = draw_blueprint(checkpoint, torch.device("cpu"), 64, quant)
    assert reads.nbytes == pytest.approx(blueprint.pass_bytes, rel=0.01)
    assert (reads.bits, reads.layers) == (bits, blueprint.config.layers)


def test_a_measured_share_counts_for_its_form_on_this_machine(tmp_path):
    _, whole = form_named("Qwen3-4B", "BF16")
    _, small = form_named("Qwen3-4B", "INT4")
    here, elsewhere = DecodeSpeed("cpu", 1e11, tmp_path), DecodeSpeed("cpu", 1e11)
    before = here.tokens_per_second(small)
    here.keep(whole, 5.0)
    assert here.tokens_per_second(whole) == pytest.approx(5.0)
    assert DecodeSpeed("cpu", 2e11, tmp_path).tokens_per_second(whole) == pytest.approx(10.0)
    assert here.tokens_per_second(small) == before
    assert elsewhere.tokens_per_second(whole) == pytest.approx(1e11 * 0.86 / whole.nbytes)
    assert known_ceiling(tmp_path, "cpu") is None


def test_the_bandwidth_is_measured_once_and_kept_where_the_fastest_reader_is(tmp_path, monkeypatch):
    found: list[Path | None] = []

    def read_ceiling(device: str, *, cache: Path | None, **_: object) -> float:
        found.append(cache)
        return 1e10

    monkeypatch.setattr(machine_speed_module, "read_ceiling", read_ceiling)
    assert machine_speed("cpu", tmp_path) == DecodeSpeed("cpu", 1e10, tmp_path)
    keep_kernels(tmp_path)
    for _ in range(2):
        assert machine_speed("cpu", tmp_path) == DecodeSpeed("cpu", 1e10, tmp_path)
    assert found == [None, tmp_path]
    assert machine_speed("cuda", tmp_path, 273 * 10**9) == DecodeSpeed("cuda", 273e9)


@pytest.mark.parametrize("error", [MemoryFull("the system refused"), RuntimeError("not enough memory\nmore")])
def test_without_memory_to_measure_there_is_no_estimate(tmp_path, monkeypatch, error):
    def refuse(*_: object, **__: object) -> float:
        raise error

    monkeypatch.setattr(machine_speed_module, "read_ceiling", refuse)
    assert machine_speed("cpu", tmp_path) is None


def said(capsys: pytest.CaptureFixture[str], *arguments: str):
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_say_the_speed_of_a_machine_that_is_not_there(tmp_path, capsys):
    folder = write_tiny_qwen3(tmp_path / "tiny")
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    common = ("models", "--model", str(folder), "--device", "cpu", "--config", str(tmp_path / "onedesk.toml"))
    (slow,), (fast,) = (said(capsys, *common, "--bandwidth", rate) for rate in ("10GB/s", "20 GB/s"))
    assert fast["expected_tokens_per_second"] == pytest.approx(2 * slow["expected_tokens_per_second"])
    assert slow["expected_tokens_per_second"] == pytest.approx(0.86e10 / slow["read_per_token"])
    keep_ceiling(tmp_path / "cache", "cpu", 4e10)
    (here,) = said(capsys, *common)
    assert here["expected_tokens_per_second"] == pytest.approx(4 * slow["expected_tokens_per_second"])
    assert cli.main([*common, "--bandwidth", "20GB/s"]) == 0
    table = capsys.readouterr().out
    assert shown_speed(fast["expected_tokens_per_second"]) in table


def test_a_plan_for_another_machine_needs_its_bandwidth(tmp_path, capsys):
    (tmp_path / "onedesk.toml").write_text("", encoding="utf-8")
    common = ("doctor", "--plan", "Qwen3-8B", "--memory", "121GiB", "--config", str(tmp_path / "onedesk.toml"))
    without = said(capsys, *common)
    assert without["read_bytes_per_second"] is None
    assert {form["expected_tokens_per_second"] for form in without["forms"]} == {None}
    assert cli.main(list(common)) == 0
    assert "--bandwidth 273GB/s" in capsys.readouterr().out
    plan = said(capsys, *common, "--bandwidth", "273GB/s")
    speeds = {form["format"]: form["expected_tokens_per_second"] for form in plan["forms"]}
    assert 13 < speeds["BF16"] < 19  # vLLM reaches 13.1 on this machine
    assert speeds["BF16"] < speeds["INT8, made on load"] < speeds["INT4, made on load"]
    assert cli.main([*common, "--bandwidth", "273GB/s"]) == 0
    assert "memory reads 273.0 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize("rate", ["fast", "0GB/s", "3-GB/s", "273GB/m", ""])
def test_what_is_no_bandwidth_is_refused(rate, capsys):
    assert cli.main(["models", "--bandwidth", rate]) == 2
    assert "is not a memory bandwidth; write for example 273GB/s" in capsys.readouterr().err


def test_a_bandwidth_without_a_plan_is_refused(capsys):
    assert cli.main(["doctor", "--bandwidth", "273GB/s"]) == 2
    assert "--bandwidth and --nodes are for --plan" in capsys.readouterr().err
