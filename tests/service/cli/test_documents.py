"""The documents that the command prints, its options and its exit codes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from command_line import pipe_in
from onedesk.service.api import OpenModel
from onedesk.service.cli import command as cli
from onedesk.service.cli import models
from onedesk.service.errors import ModelError
from onedesk.service.registry import REGISTRY
from onedesk.service.text.template import ChatTemplate
from tiny_qwen3 import write_tiny_qwen3

RESULT_KEYS = {"text", "reasoning", "ids", "finish", "seed", "usage", "seconds", "stages", "logprob", "sampling"}


def test_generate_prints_one_document_with_every_key(run):
    status, document = run("generate", "the red cat", "--model", "tiny", "--max-tokens", "5", "--greedy")
    assert status == 0
    assert set(document) == RESULT_KEYS
    assert len(document["ids"]) == 5
    assert document["finish"] == "length"
    assert document["usage"] == {"prompt": document["usage"]["prompt"], "completion": 5, "reasoning": 0, "cached": 0}
    assert set(document["seconds"]) == {"load", "first_token", "total"}
    assert set(document["stages"]["decode"]) >= {"seconds", "bytes", "major_faults", "minor_faults", "allocations"}


def test_a_seed_repeats_and_choices_count_up_from_it(run):
    options = (
        "generate",
        "a cat",
        "--model",
        "tiny",
        "--max-tokens",
        "6",
        "--temperature",
        "1.5",
        "--seed",
        str(2**64 - 1),
    )
    single = run(*options)[1]
    choices = run(*options, "--n", "3")[1]["choices"]
    assert [choice["seed"] for choice in choices] == [2**64 - 1, 0, 1]
    assert (choices[0]["text"], choices[0]["ids"]) == (single["text"], single["ids"])
    assert len({tuple(choice["ids"]) for choice in choices}) == 3


def test_best_of_and_beam_search_list_the_best_first(run):
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
        ["demo", "a cat", "--model", "tiny"],
        ["demo", "a cat", "--quant", "int8"],
    ],
)
def test_wrong_usage_is_status_2_with_one_document(run, monkeypatch, arguments):
    pipe_in(monkeypatch, b"")
    status, document = run(*arguments)
    assert status == 2
    assert document["error"]["type"] == "UsageError"
    assert 0 < len(document["error"]["message"]) < 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["generate", "a", "cat"],
            "unrecognized arguments: cat; put a text of several words in quotes; see onedesk generate --help",
        ),
        (
            ["generate", "a cat", "--context", "9" * 30],
            "is not a whole number from 2, of at most 19 digits; see onedesk generate --help",
        ),
        (["frobnicate"], "invalid choice: 'frobnicate' (choose from"),
    ],
)
def test_wrong_words_are_answered_with_what_to_do(run, words, message):
    status, document = run(*words)
    assert status == 2
    assert message in document["error"]["message"]


def test_no_command_names_two_to_begin_with(capsys):
    assert cli.main([]) == 2
    assert "try onedesk models, or onedesk generate" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_another_file_of_a_model_is_not_called_damaged(run, tree, name):
    status, document = run("generate", "a cat", "--model", str(tree / "models" / "tiny" / name))
    assert (status, document["error"]["type"]) == (1, "FileError")
    assert (
        document["error"]["message"]
        == f"{name} is not a safetensors file; name the model's folder, or a file that ends in .safetensors"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0; use a whole number from 1"),
        (["--temperature", "-1"], "--temperature is -1.0; use a number from 0 to 3.403e+38"),
        (["--top-p", "0"], "--top-p is 0.0; use a number above 0 to 1"),
        (["--min-p", "2"], "--min-p is 2.0; use a number from 0 to 1"),
        (["--top-k", "-1"], "--top-k is -1; use a whole number, 0 for no limit"),
        (["--seed", "-1"], "--seed is -1; use a whole number from 0 to 2^64-1"),
        (["--thinking-budget", "-1"], "--thinking-budget is -1; use a whole number from 0"),
        (["--stop", ""], "a --stop string is empty; leave it out or write at least one character"),
        (["--n", "200"], "--n is 200; use a whole number from 1 to 128"),
        (
            ["--best-of", "2", "--beams", "2"],
            "--best-of and --beams exclude each other: one draws, the other searches; give one of them",
        ),
        (
            ["--beams", "2", "--stop", "x"],
            "a search with --beams ends at the model's own end or --max-tokens and does not know --stop; leave it out",
        ),
    ],
)
def test_an_option_is_called_as_it_was_typed(run, options, message):
    status, document = run("generate", "a cat", *options)
    assert (status, document["error"]["message"]) == (2, message)


@pytest.mark.parametrize("words", [("generate", "a cat"), ("models",), ("demo", "a cat")], ids=lambda words: words[0])
def test_an_unknown_option_points_to_the_help_of_its_command(run, words):
    status, document = run(*words, "--frobnicate")
    wanted = f"unrecognized arguments: --frobnicate; see onedesk {words[0]} --help"
    assert (status, document["error"]["message"]) == (2, wanted)


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
        (
            ["generate", "a cat", "--model", "tiny", "--context", "257"],
            "RequestError",
            "--context is 257, but the model's config allows 256",
        ),
        (
            ["score", "--ids", ",".join(["1"] * 257), "--model", "tiny"],
            "RequestError",
            "longer than the --context of 256",
        ),
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


@pytest.mark.parametrize(("default", "kind"), [("nosuch", "ModelError"), ("no\\u0000such", "FileError")])
def test_a_missing_default_model_is_named_with_its_setting(run, tree, tmp_path, default, kind):
    config = tmp_path / "onedesk.toml"
    config.write_text(f'[models]\nroots = ["{tree / "models"}"]\ndefault = "{default}"\n', encoding="utf-8")
    for words in (["generate", "a cat"], ["quantize", "--quant", "int8"]):
        status, document = run(*words, config=config)
        assert (status, document["error"]["type"]) == (1, kind)
        assert document["error"]["message"].startswith("default in [models] of onedesk.toml: ")
    assert run("generate", "a cat", "--max-tokens", "1", "--model", "tiny", config=config)[0] == 0


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
    template.write_text(
        template.read_text(encoding="utf-8").replace("assistant\\n' }}", "assistant\\n<think>\\n' }}"), encoding="utf-8"
    )
    return folder


def test_an_answer_of_reasoning_only_is_printed_and_fails(run, thinker):
    options = (
        "generate",
        "a cat",
        "--model",
        str(thinker),
        "--greedy",
        "--repetition-stop",
        "off",
        "--max-tokens",
        "8",
    )
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

    monkeypatch.setattr(models, "load_config", interrupted)
    status, document = run("models")
    assert (status, document) == (130, {"error": {"type": "Cancelled", "message": "interrupted"}})


def test_what_fails_after_an_interrupt_was_interrupted(run, monkeypatch):
    def render(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        raise ModelError("the chat template was not done after 5 s")

    monkeypatch.setattr(ChatTemplate, "render", render)
    status, document = run("generate", "a cat", "--model", "tiny")
    assert (status, document) == (130, {"error": {"type": "Cancelled", "message": "interrupted"}})
