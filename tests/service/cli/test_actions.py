"""What else the command does: chat, score, models, memory, doctor."""

from __future__ import annotations

import os
import signal
import time

import pytest
from command_line import pipe_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.api import OpenModel
from onedesk.service.cli import command as cli
from tiny_qwen3 import write_tiny_qwen3


def test_the_configured_context_is_for_models_that_allow_it(run, tree, tmp_path):
    config = tmp_path / "onedesk.toml"
    config.write_text(f'[models]\nroots = ["{tree / "models"}"]\ncontext = 100000\n', encoding="utf-8")
    status, document = run(
        "generate", "a cat", "--max-tokens", "500", "--repetition-stop", "off", "--greedy", config=config
    )
    assert (status, document["finish"]) == (0, "length")
    assert document["usage"]["prompt"] + document["usage"]["completion"] == 256


def test_chat_remembers_resets_and_ends(tree, capsys, monkeypatch):
    seen = []
    generate = OpenModel.generate

    def watched(self, request, **options):
        seen.append([(m.role, m.content) for m in request.messages])
        return generate(self, request, **options)

    monkeypatch.setattr(OpenModel, "generate", watched)
    pipe_in(monkeypatch, b"one\n\ntwo\n/reset\nthree\n/exit\nfour\n")
    options = ["--system", "be brief", "--max-tokens", "3", "--greedy", "--config", str(tree / "onedesk.toml")]
    assert cli.main(["chat", *options]) == 0
    answer = seen[1][2][1]
    assert seen[0] == [("system", "be brief"), ("user", "one")]
    assert seen[1] == [("system", "be brief"), ("user", "one"), ("assistant", answer), ("user", "two")]
    assert seen[2] == [("system", "be brief"), ("user", "three")]
    assert len(seen) == 3
    assert capsys.readouterr().out.startswith(answer)


def test_chat_goes_on_after_a_message_that_is_too_long(tree, capsys, monkeypatch):
    pipe_in(monkeypatch, ("x" * 400 + "\nshort\n").encode())
    assert cli.main(["chat", "--max-tokens", "3", "--config", str(tree / "onedesk.toml")]) == 0
    err = capsys.readouterr().err
    assert "the context is 256" in err
    assert "[length: " in err


def test_score_of_one_token_says_why_there_is_no_figure(tree, capsys):
    assert cli.main(["score", "--ids", "7", "--model", "tiny", "--config", str(tree / "onedesk.toml")]) == 0
    assert capsys.readouterr().out == "no perplexity (the first token has no context) over 1 token in 1 window\n"


def test_score_of_ids_and_of_a_text_in_windows(run, tree, tmp_path):
    status, by_ids = run("score", "--ids", "1,2,3,4", "--model", "tiny")
    assert (status, by_ids["tokens"], len(by_ids["logprobs"]), by_ids["windows"]) == (0, 4, 3, 1)
    assert all(value < 0 for value in by_ids["logprobs"])
    assert by_ids["perplexity"] > 1
    text = tmp_path / "text.txt"
    text.write_text("ab" * 200, encoding="utf-8")
    status, by_text = run("score", "--text-file", str(text), "--model", "tiny")
    assert (status, by_text["tokens"], len(by_text["logprobs"])) == (0, 400, 399)
    assert by_text["windows"] == 3
    assert run("score", "--ids", "7", "--model", "tiny")[1] == {
        "tokens": 1,
        "logprobs": [],
        "perplexity": None,
        "windows": 1,
    }


def test_models_are_rows_and_broken_ones_say_why(run, tmp_path):
    models = tmp_path / "models"
    write_tiny_qwen3(models / "whole", dtype="bfloat16")
    write_tiny_qwen3(models / "onedesk-demo-writer")
    write_tiny_qwen3(models / "other", model_type="mamba")
    cut = write_tiny_qwen3(models / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    status, rows = run("models", config=config)
    by_name = {row["name"]: row for row in rows}
    assert (status, sorted(by_name)) == (0, ["cut", "onedesk-demo-writer", "other", "whole"])
    whole = by_name["whole"]
    assert (whole["family"], whole["format"], whole["fits"]) == ("qwen3", "BF16", True)
    assert whole["parameters"] == whole["active_parameters"] == 230_208
    assert whole["bytes"]["table"] == 0
    assert whole["bytes"]["weights"] >= 2 * 230_208
    assert whole["bytes"]["kv_per_1k"] == 1000 * 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, head size, fp32
    assert [row["toy"] for row in rows] == [row["name"] == "onedesk-demo-writer" for row in rows]
    assert (by_name["cut"]["fits"], by_name["cut"]["parameters"]) == (False, None)
    assert "model.safetensors" in by_name["cut"]["reason"]
    assert (by_name["other"]["family"], by_name["other"]["fits"]) == ("mamba", False)
    assert "supported: qwen2, " in by_name["other"]["reason"]
    assert [row["name"] for row in run("models", "--model", "whole", config=config)[1]] == ["whole"]


def test_a_model_beyond_the_budget_does_not_fit(run, tree, tmp_path):
    config = tmp_path / "onedesk.toml"
    config.write_text(f'[memory]\nlimit_bytes = "1MiB"\n[models]\nroots = ["{tree / "models"}"]\n', encoding="utf-8")
    row = run("models", config=config)[1][0]
    assert row["fits"] is False
    assert "does not fit: needs" in row["reason"]
    status, document = run("generate", "a cat", config=config)
    assert (status, document["error"]["type"]) == (1, "MemoryFull")


SPARK = {
    "MemTotal": 127_599_000,
    "MemFree": 2_936_012,
    "MemAvailable": 54_525_952,
    "Cached": 51_000_000,
    "Buffers": 100_000,
    "Shmem": 50_000,
}


def test_memory_plans_for_another_machine(run, tmp_path):
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)
    (proc / "meminfo").write_text("".join(f"{key}: {value} kB\n" for key, value in SPARK.items()), encoding="ascii")
    (proc / "pressure" / "memory").write_text("some avg10=1.50 avg60=0.00 avg300=0.00 total=5\n", encoding="ascii")
    (proc / "vmstat").write_text("pgmajfault 7\nnr_free_pages 3\n", encoding="ascii")
    status, report = run("memory", "--proc", str(proc))
    assert status == 0
    truth = report["truth"]
    assert (truth["total"], truth["available"]) == (127_599_000 * 1024, 54_525_952 * 1024)
    assert (truth["device_free"], truth["integrated"], truth["psi_some_avg10"]) == (None, False, 1.5)
    assert truth["page_cache"] == (51_000_000 + 100_000 - 50_000) * 1024
    limit = int(54_525_952 * 1024 * 0.7)
    assert report["budget"] == {
        "limit": limit,
        "kept_back": int(limit * 0.05),
        "floor": 512 << 20,
        "promised": 0,
        "used": 0,
    }
    assert report["leases"] == []
    assert report["counters"] == {"pgmajfault": 7}


def test_memory_of_this_machine_as_a_table(tree, capsys):
    assert cli.main(["memory", "--config", str(tree / "onedesk.toml")]) == 0
    out = capsys.readouterr().out
    assert "available" in out
    assert "nothing is leased" in out


def test_memory_is_watched_until_an_interrupt(tree, capsys, monkeypatch):
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(time, "sleep", wait)
    assert cli.main(["memory", "--watch", "--config", str(tree / "onedesk.toml")]) == 130
    assert capsys.readouterr().out.count("nothing is leased") == 3


def test_doctor_says_ok_or_what_to_do(run, tree, tmp_path):
    status, document = run("doctor")
    assert (status, document["ok"]) == (0, True)
    assert {check["status"] for check in document["checks"]} <= {"ok", "warning"}
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[servise]\n", encoding="utf-8")
    status, document = run("doctor", config=wrong)
    assert (status, document["ok"]) == (1, False)
    assert {"name", "status", "detail", "fix"} == set(document["checks"][0])


def test_a_warning_names_its_logger_with_v_only(tree, capsys):
    for words, shown in (((), "onedesk: it is slow"), (("-v",), "WARNING:onedesk.service.cli.command:it is slow")):
        assert cli.main(["models", *words, "--config", str(tree / "onedesk.toml")]) == 0
        cli.log.warning("it is %s", "slow")
        assert shown in capsys.readouterr().err.splitlines()


def test_version_and_help_are_no_errors(capsys):
    for arguments in (["--version"], ["--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    assert "--repetition-stop" in capsys.readouterr().out


def test_help_has_every_option_and_default():
    (commands,) = (action for action in cli.make_parser()._actions if isinstance(action.choices, dict))
    options = [(name, action) for name, parser in commands.choices.items() for action in parser._actions]
    told = {(name, action.dest): action.help or "" for name, action in options}
    assert [key for key, text in told.items() if not text] == []
    free = {
        "model",
        "prompt",
        "ids",
        "best_of",
        "beams",
        "system",
        "stop",
        "text_file",
        "kind",
        "idea",
        "config",
        "proc",
        "check",
        "plan",
    }
    free |= {"memory", "images", "image", "against", "uds", "roots", "name", "local", "files", "action", "rest"}
    valued = {(name, action.dest) for name, action in options if action.nargs != 0 and action.dest not in free}
    assert [key for key in valued if "default" not in told[key]] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--plan", "x", "--memory", "4"], "4 is so many bytes; add the unit, such as 4GiB"),
        (["serve", "--uds", ""], "argument --uds: the path is empty"),
        (["serve", "--token-file", ""], "argument --token-file: the path is empty"),
        (["serve", "--roots", ""], "argument --roots: the path is empty"),
        (["memory", "--proc", ""], "argument --proc: the path is empty"),
        (["score", "--text-file", ""], "argument --text-file: the path is empty"),
        (["generate", "x", "--image", ""], "argument --image: the path is empty"),
        (["describe", ""], "argument FILE: the path is empty"),
        (["pull", "--import", "", "Qwen/Qwen3-4B"], "argument --import: the path is empty"),
        (["models", "--config", ""], "argument --config: the path is empty"),
        (["knowledge", "add", "k", ""], "was given an empty PATH"),
    ],
)
def test_sizes_need_a_unit_and_paths_are_not_empty(words, said, tree, capsys):
    assert cli.main([*words, "--config", str(tree / "onedesk.toml")]) == 2
    assert said in capsys.readouterr().err


@given(name=st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_command_prints_what_moves_the_cursor(name, tree, tmp_path, capsys):
    """A file's name may have escape sequences; a message may quote it, a terminal must not obey it."""
    name = f"\x1b[2J{name}"
    options = ["--config", str(tree / "onedesk.toml")]
    for words in (
        ["describe", str(tmp_path / name)],
        ["generate", "x", "--image", str(tmp_path / name)],
        ["score", "--text-file", str(tmp_path / name)],
        ["models", "--model", str(tmp_path / name)],
        ["knowledge", "add", name, str(tmp_path)],
    ):
        assert cli.main([*words, *options]) != 0
        shown = capsys.readouterr()
        assert "\x1b" not in shown.err + shown.out
        assert all(sign.isprintable() or sign == "\n" for sign in shown.err + shown.out)


def test_no_command_prints_what_moves_the_cursor_where_it_succeeds(tree, tmp_path, capsys):
    """Names and texts of documents and settings are others' writing too."""
    note = tmp_path / "cats\x1b[2J.md"
    note.write_text("# head\x1b[31m\n\tcats \x1b]0;title\x07 here\n", encoding="utf-8")
    options = ["--config", str(tree / "onedesk.toml")]
    for words in (["add", "escapes", str(note)], ["search", "escapes", "cats"], ["list"], ["remove", "escapes"]):
        assert cli.main(["knowledge", *words, *options]) == 0
        shown = capsys.readouterr()
        assert all(sign.isprintable() or sign == "\n" for sign in shown.err + shown.out)
