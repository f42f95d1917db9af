"""The command's contract: options, JSON documents, exit codes, streams, signals."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_kernels import keep_kernels
from onedesk.service import cli
from onedesk.service import config as config_module
from onedesk.service.api import OpenModel
from onedesk.service.errors import ModelError
from onedesk.service.registry import REGISTRY
from onedesk.service.text.template import ChatTemplate
from tiny_qwen3 import write_tiny_qwen3

COMMAND = [sys.executable, "-m", "onedesk.service.cli"]
ENDS_WITHIN = 60  # seconds until a hanging child fails its test; starting torch on a busy machine takes several
RESULT_KEYS = {"text", "reasoning", "ids", "finish", "seed", "usage", "seconds", "stages", "logprob"}

Run = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with onedesk.toml and the model `tiny`; its context is 256."""
    tree = tmp_path_factory.mktemp("tree")
    write_tiny_qwen3(tree / "models" / "tiny", context=256)
    (tree / "onedesk.toml").write_text("[models]\ncontext = 256\n", encoding="utf-8")
    keep_kernels(tree / "cache")
    return tree


@pytest.fixture(autouse=True)
def no_shipped_models(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the models that a test writes are there, not the toys of the checkout."""
    monkeypatch.setattr(config_module, "package_folder", lambda: tree / "models" / "tiny")


@pytest.fixture
def run(tree: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process against the tree; returns its status and the one JSON document on stdout."""

    def call(*arguments: str, config: Path = tree / "onedesk.toml") -> tuple[int, Any]:
        capsys.readouterr()
        status = cli.main([*arguments, "--config", str(config), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return call


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def start(tree: Path, *arguments: str | bytes, **options: Any) -> subprocess.Popen[bytes]:
    command = [*COMMAND, *arguments, "--config", str(tree / "onedesk.toml")]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_generate_prints_one_document_with_every_key(run):
    status, document = run("generate", "the red cat", "--model", "tiny", "--max-tokens", "5", "--greedy")
    assert status == 0
    assert set(document) == RESULT_KEYS
    assert len(document["ids"]) == 5
    assert document["finish"] == "length"
    assert document["usage"] == {"prompt": document["usage"]["prompt"], "completion": 5, "reasoning": 0, "cached": 0}
    assert set(document["seconds"]) == {"load", "first_token", "total"}
    assert set(document["stages"]["decode"]) >= {"seconds", "bytes", "major_faults", "minor_faults", "allocations"}


def test_the_same_seed_writes_the_same_and_choices_count_on_from_it(run):
    options = ("generate", "a cat", "--model", "tiny", "--max-tokens", "6", "--temperature", "1.5", "--seed", str(2**64 - 1))
    single = run(*options)[1]
    choices = run(*options, "--n", "3")[1]["choices"]
    assert [choice["seed"] for choice in choices] == [2**64 - 1, 0, 1]
    assert (choices[0]["text"], choices[0]["ids"]) == (single["text"], single["ids"])
    assert len({tuple(choice["ids"]) for choice in choices}) == 3


def test_the_best_of_several_and_a_search_are_told_the_best_first(run):
    options = ("generate", "a cat", "--model", "tiny", "--max-tokens", "6", "--seed", "5", "--n", "2")
    for way in ("--best-of", "--beams"):
        status, document = run(*options, way, "4")
        sums = [choice["logprob"] for choice in document["choices"]]
        assert (status, sums) == (0, sorted(sums, reverse=True))
        assert len(sums) == 2


def test_several_choices_stand_one_after_the_other_on_a_terminal(run, tree, capsys):
    options = ("generate", "a cat", "--model", "tiny", "--max-tokens", "6", "--seed", "5", "--n", "3")
    choices = run(*options)[1]["choices"]
    assert cli.main([*options, "--config", str(tree / "onedesk.toml")]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(choice["text"] + "\n" for choice in choices)
    assert [line.rpartition("seed ")[2] for line in shown.err.splitlines() if "; seed " in line] == ["5]", "6]", "7]"]


def test_a_seed_that_was_not_given_is_told_and_repeats_the_text(run):
    first = run("generate", "a cat", "--model", "tiny", "--max-tokens", "6")[1]
    again = run("generate", "a cat", "--model", "tiny", "--max-tokens", "6", "--seed", str(first["seed"]))[1]
    assert again["ids"] == first["ids"]


def test_raw_ids_need_no_tokenizer(run, tree, tmp_path):
    bare = write_tiny_qwen3(tmp_path / "bare", tokenizer=False, template=False)
    status, document = run("generate", "--ids", "1, 2,3", "--model", str(bare), "--max-tokens", "4", "--greedy")
    assert (status, document["text"], len(document["ids"])) == (0, "", 4)
    status, document = run("generate", "a cat", "--model", str(bare))
    assert status == 1
    assert document["error"]["type"] == "ModelError"


def test_a_lone_file_finds_what_stands_beside_it(run, tree):
    file = tree / "models" / "tiny" / "model.safetensors"
    by_file = run("generate", "a cat", "--model", str(file), "--max-tokens", "4", "--greedy")[1]
    assert by_file["ids"] == run("generate", "a cat", "--model", "tiny", "--max-tokens", "4", "--greedy")[1]["ids"]


def test_the_only_model_needs_no_name(run):
    assert run("generate", "a cat", "--max-tokens", "2")[0] == 0


def test_without_a_name_among_many_the_usage_is_wrong(run, tmp_path):
    for name in ("one", "two"):
        write_tiny_qwen3(tmp_path / "models" / name)
    config = tmp_path / "onedesk.toml"
    config.write_text("", encoding="utf-8")
    status, document = run("generate", "a cat", config=config)
    assert (status, document["error"]["type"]) == (2, "UsageError")
    assert "--model" in document["error"]["message"]
    config.write_text('[models]\ndefault = "two"\n', encoding="utf-8")
    assert run("generate", "a cat", "--max-tokens", "1", config=config)[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["generate", "a cat", "--frobnicate"],
        ["generate", "a cat", "--max-tokens", "0"],
        ["generate", "a cat", "--max-tokens", "many"],
        ["generate", "a cat", "--temperature", "-0.1"],
        ["generate", "a cat", "--temperature", "nan"],
        ["generate", "a cat", "--top-p", "0"],
        ["generate", "a cat", "--top-p", "1.01"],
        ["generate", "a cat", "--top-k", "-1"],
        ["generate", "a cat", "--min-p", "nan"],
        ["generate", "a cat", "--seed", "-1"],
        ["generate", "a cat", "--seed", str(2**64)],
        ["generate", "a cat", "--seed", "1.5"],
        ["generate", "a cat", "--stop", ""],
        ["generate", "a cat", "--thinking", "maybe"],
        ["generate", "a cat", "--thinking-budget", "-1"],
        ["generate", "a cat", "--repetition-stop", "perhaps"],
        ["generate", "a cat", "--n", "0"],
        ["generate", "a cat", "--n", "129"],
        ["generate", "a cat", "--n", "3", "--best-of", "2"],
        ["generate", "a cat", "--best-of", "0"],
        ["generate", "a cat", "--best-of", "2", "--beams", "2"],
        ["generate", "a cat", "--beams", "9"],
        ["generate", "a cat", "--beams", "2", "--temperature", "0.5"],
        ["generate", "a cat", "--beams", "2", "--top-k", "5"],
        ["generate", "a cat", "--beams", "2", "--stop", "x"],
        ["generate", "a cat", "--beams", "2", "--thinking-budget", "5"],
        ["generate", "a cat", "--context", "0"],
        ["generate", "a cat", "--device", "tpu"],
        ["generate", "a cat", "--quant", "int3"],
        ["generate", "a cat", "--greedy", "--temperature", "0.5"],
        ["generate", "--ids", "1,x"],
        ["generate", "--ids", "-1"],
        ["generate", "--ids", ""],
        ["generate", "--ids", "1,,2"],
        ["generate", "--ids", "9" * 5000],
        ["generate", "a cat", "--max-tokens", "1.5"],
        ["generate", "a cat", "--seed", "1_0"],
        ["generate", "a cat", "--top-k", "\u0663"],
        ["generate", "a cat", "--thinking-budget", "9" * 5000],
        ["generate", "a cat", "--temperature", "1_0"],
        ["generate", "a cat", "--top-p", ""],
        ["generate", "a cat", "--ids", "1"],
        ["generate"],
        ["score"],
        ["score", "--ids", "1,2", "--text-file", "x"],
        ["memory", "--watch"],
        ["bench", "everything"],
        ["bench", "prefill", "--batch", "1,2"],
        ["bench", "decode", "--batch", "x"],
        ["bench", "decode", "--cycles", "0"],
        ["bench", "decode", "--against", "nobody"],
    ],
)
def test_wrong_usage_is_status_2_with_one_document(run, monkeypatch, arguments):
    pipe_in(monkeypatch, b"")
    status, document = run(*arguments)
    assert status == 2
    assert document["error"]["type"] == "UsageError"
    assert 0 < len(document["error"]["message"]) < 400


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["generate", "a cat", "--model", "lost"], "ModelError", "there is no model 'lost'"),
        (["generate", "", "--model", "tiny"], "RequestError", "the prompt is empty"),
        (["generate", "  ", "--model", "tiny"], "RequestError", "the prompt is empty"),
        (["generate", "a \udc80 cat", "--model", "tiny"], "RequestError", "lone surrogate U+DC80) at position 2"),
        (["generate", "a cat", "--system", "\ud800", "--model", "tiny"], "RequestError", "lone surrogate U+D800"),
        (["generate", "a cat", "--stop", "\udc80", "--model", "tiny"], "RequestError", "lone surrogate"),
        (["generate", "x" * 300, "--model", "tiny"], "RequestError", "the context is 256"),
        (["generate", "--ids", "512", "--model", "tiny"], "RequestError", "use 0 to 511"),
        (["generate", "a cat", "--model", "tiny", "--context", "257"], "RequestError", "context is 257, but the model's config allows 256"),
        (["score", "--ids", ",".join(["1"] * 257), "--model", "tiny"], "RequestError", "longer than the context of 256"),
        (["score", "--text-file", "lost.txt", "--model", "tiny"], "FileError", "cannot read the text file lost.txt"),
        (["generate", "a cat", "--model", ""], "FileError", "'' is neither a model name nor a path"),
        (["models", "--model", "lost"], "ModelError", "there is no model 'lost'"),
        (["memory", "--proc", "lost"], "FileError", "must hold a copy of /proc/meminfo"),
    ],
)
def test_what_fails_is_status_1_with_one_document(run, arguments, kind, said):
    status, document = run(*arguments)
    assert status == 1
    assert document["error"]["type"] == kind
    assert said in document["error"]["message"]


def test_a_prompt_of_a_megabyte_is_refused_with_both_numbers(run, monkeypatch):
    pipe_in(monkeypatch, b"cat " * 250_000)
    status, document = run("generate", "-", "--model", "tiny")
    assert (status, document["error"]["type"]) == (1, "RequestError")
    assert "context is 256" in document["error"]["message"]


def test_a_wrong_configuration_is_told(run, tmp_path):
    config = tmp_path / "wrong.toml"
    config.write_text("[memory]\nlimitt = 1\n", encoding="utf-8")
    status, document = run("models", config=config)
    assert (status, document["error"]["type"]) == (1, "FileError")
    assert "unknown key 'limitt' in [memory]" in document["error"]["message"]


@pytest.mark.parametrize("prompt", [["-"], []])
def test_a_prompt_can_come_through_a_pipe(run, monkeypatch, prompt):
    wanted = run("generate", "die Süße 猫", "--model", "tiny", "--max-tokens", "1")[1]["usage"]["prompt"]
    pipe_in(monkeypatch, "\ufeffdie Süße 猫\r\n".encode())
    assert run("generate", *prompt, "--model", "tiny", "--max-tokens", "1")[1]["usage"]["prompt"] == wanted


def test_a_pipe_that_is_not_utf8_is_refused(run, monkeypatch):
    pipe_in(monkeypatch, "Süße".encode("latin-1"))
    status, document = run("generate", "-", "--model", "tiny")
    assert (status, document["error"]["message"]) == (1, "standard input is not UTF-8 (byte 1); write it as UTF-8")


def test_stop_strings_end_the_text(run):
    options = ("generate", "a cat", "--model", "tiny", "--greedy", "--max-tokens", "40", "--repetition-stop", "off")
    whole = run(*options)[1]["text"]
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable() and whole.index(c) > 0)
    status, document = run(*options, "--stop", "never written", "--stop", stop)
    assert (status, document["finish"], document["text"]) == (0, "stop_string", whole[: whole.index(stop)])


@pytest.fixture
def thinker(tmp_path: Path) -> Path:
    """A model whose turn opens with <think>, and which ends after some tokens of it."""
    folder = write_tiny_qwen3(tmp_path / "thinker", context=256)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"), encoding="utf-8")
    return folder


def test_an_answer_of_reasoning_only_is_printed_and_fails(run, thinker):
    options = ("generate", "a cat", "--model", str(thinker), "--greedy", "--repetition-stop", "off", "--max-tokens", "8")
    ids = run(*options)[1]["ids"]
    end = next(token for token in ids[3:] if token not in ids[:3])
    generation = {"eos_token_id": [end]}
    (thinker / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    status, document = run(*options)
    assert status == 1
    assert set(document) >= RESULT_KEYS
    assert (document["text"], document["finish"]) == ("", "stop")
    assert document["reasoning"]
    assert document["error"]["type"] == "RequestError"
    assert "only reasoned" in document["error"]["message"]


def test_an_interrupt_while_writing_keeps_the_text(run, monkeypatch):
    generate = OpenModel.generate

    def interrupted(self, *arguments, **options):
        for event in generate(self, *arguments, **options):
            yield event
            if event.token is not None:
                os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(OpenModel, "generate", interrupted)
    status, document = run("generate", "a cat", "--model", "tiny", "--max-tokens", "50")
    assert (status, document["finish"], len(document["ids"])) == (130, "cancelled", 1)
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_before_the_load_gives_an_empty_answer(run, monkeypatch):
    opened = type(REGISTRY).open

    def interrupted(self, *arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return opened(self, *arguments, **options)

    monkeypatch.setattr(type(REGISTRY), "open", interrupted)
    status, document = run("generate", "a cat", "--model", "tiny", "--n", "3")
    assert (status, len(document["choices"])) == (130, 1)
    assert (document["choices"][0]["finish"], document["choices"][0]["ids"]) == ("cancelled", [])


def test_an_interrupt_elsewhere_is_a_document_too(run, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_config", interrupted)
    status, document = run("models")
    assert (status, document) == (130, {"error": {"type": "Cancelled", "message": "interrupted"}})


def test_what_fails_after_an_interrupt_was_interrupted(run, monkeypatch):
    def render(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        raise ModelError("the chat template was not done after 5 s")

    monkeypatch.setattr(ChatTemplate, "render", render)
    status, document = run("generate", "a cat", "--model", "tiny")
    assert (status, document) == (130, {"error": {"type": "Cancelled", "message": "interrupted"}})


@pytest.fixture(scope="module")
def slow(tree: Path) -> Path:
    """A model with room for minutes of tokens."""
    return write_tiny_qwen3(tree.parent / "slow", layers=12, context=200_000)


ENDLESS = ("--ids", "1,2", "--max-tokens", "190000", "--context", "199000", "--greedy")


@pytest.fixture
def endless(tree: Path, slow: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    """The command, writing a text without end; its first byte has been read."""
    config = tmp_path / "tree"
    config.mkdir()
    shutil.copy(tree / "onedesk.toml", config)
    keep_kernels(config / "cache")  # else stderr says that they are compiled
    child = start(config, "generate", "--model", str(slow), *ENDLESS)
    assert child.stdout is not None
    try:
        assert child.stdout.read(1)
        yield child
    finally:
        child.kill()
        child.communicate()


def test_sigint_prints_what_was_written_and_ends_with_130(endless):
    endless.send_signal(signal.SIGINT)
    out, err = endless.communicate(timeout=ENDS_WITHIN)
    assert endless.returncode == 130
    assert out.endswith(b"\n")
    assert b"[cancelled: 2 + " in err
    assert b"Traceback" not in err


def test_sigterm_ends_the_command(endless):
    endless.terminate()
    endless.communicate(timeout=ENDS_WITHIN)
    assert endless.returncode == -signal.SIGTERM


def test_a_reader_that_leaves_ends_it_quietly(endless):
    endless.stdout.close()
    assert endless.stderr.read() == b""
    assert endless.wait(ENDS_WITHIN) == 1


def test_any_console_encoding_is_safe(tree):
    options = ("--model", "tiny", "--greedy", "--max-tokens", "20", "--repetition-stop", "off")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    child = start(tree, "generate", "猫", *options, env=environment)
    out, err = child.communicate(timeout=ENDS_WITHIN)
    assert (child.returncode, b"Traceback" in err) == (0, False)
    assert b"\\ufffd" in out
    assert out.isascii()


def test_a_closed_stderr_puts_nothing_on_stdout(tree):
    arguments = ["generate", "a cat", "--model", "tiny", "--max-tokens", "2", "--config", str(tree / "onedesk.toml"), "--json"]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, *arguments]
    done = subprocess.run(shell, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, timeout=ENDS_WITHIN)
    assert (done.returncode, json.loads(done.stdout)["finish"]) == (0, "length")


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_full_disk_behind_stdout_is_told_without_a_traceback(tree, form):
    arguments = ["generate", "a cat", "--model", "tiny", "--max-tokens", "2", "--config", str(tree / "onedesk.toml"), *form]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False, timeout=ENDS_WITHIN
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert b"No space left on device" in done.stderr


def test_a_chat_without_a_standard_input_ends(tree, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat", "--model", "tiny", "--config", str(tree / "onedesk.toml")]) == 0


def test_the_configured_context_is_for_models_that_allow_it(run, tree, tmp_path):
    config = tmp_path / "onedesk.toml"
    config.write_text(f'[models]\nroots = ["{tree / "models"}"]\ncontext = 100000\n', encoding="utf-8")
    status, document = run("generate", "a cat", "--max-tokens", "500", "--repetition-stop", "off", config=config)
    assert (status, document["finish"]) == (0, "length")
    assert document["usage"]["prompt"] + document["usage"]["completion"] == 256


def test_bytes_that_are_no_text_are_refused(tree):
    child = start(tree, "generate", b"a cat \xff", "--model", "tiny", "--json")
    out, _ = child.communicate(timeout=ENDS_WITHIN)
    assert child.returncode == 1
    assert "lone surrogate U+DCFF" in json.loads(out)["error"]["message"]


def test_text_goes_to_stdout_and_the_rest_to_stderr(tree, capsys, run):
    wanted = run("generate", "a cat", "--model", "tiny", "--greedy", "--max-tokens", "6")[1]["text"]
    status = cli.main(["generate", "a cat", "--model", "tiny", "--greedy", "--max-tokens", "6", "--config", str(tree / "onedesk.toml")])
    out, err = capsys.readouterr()
    assert (status, out) == (0, wanted + "\n")
    assert err.startswith("[length: ")


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
    assert run("score", "--ids", "7", "--model", "tiny")[1] == {"tokens": 1, "logprobs": [], "perplexity": None, "windows": 1}


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
    assert "supported: qwen3" in by_name["other"]["reason"]
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
    assert report["budget"] == {"limit": limit, "kept_back": int(limit * 0.05), "floor": 512 << 20, "used": 0}
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

    monkeypatch.setattr(cli.time, "sleep", wait)
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


def test_version_and_help_are_no_errors(capsys):
    for arguments in (["--version"], ["--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
    assert "--repetition-stop" in capsys.readouterr().out
