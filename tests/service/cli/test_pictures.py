"""`describe`, `generate --image` and `score --image` on files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from pictures import drawn, encoded, pillow
from tiny_vision import write_seer


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seer(tmp_path_factory.mktemp("seer") / "seer")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two pictures, of 64 x 96 and 160 x 128 pixels."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "one.png").write_bytes(encoded(pillow(drawn(96, 64, 1))))
    (folder / "two.jpg").write_bytes(encoded(pillow(drawn(160, 128, 2)), "JPEG"))
    return [str(folder / "one.png"), str(folder / "two.jpg")]


def ask(run: Run, seer: Path, *arguments: str) -> tuple[int, Any]:
    return run(*arguments, "--model", str(seer), "--greedy", "--max-tokens", "4", "--context", "256")


def image_token(seer: Path) -> int:
    import json

    return json.loads((seer / "config.json").read_text())["image_token_id"]


def test_describe_says_what_was_read(run: Run, seer: Path, files: list[str]):
    status, document = ask(run, seer, "describe", *files)
    assert status == 0
    assert document["images"] == [
        {"file": files[0], "width": 96, "height": 64, "tokens": 6},
        {"file": files[1], "width": 160, "height": 128, "tokens": 20},
    ]
    assert document["usage"]["prompt"] > 26
    one = ask(run, seer, "describe", files[0], "--question", "What colour is it?", "--pixels", "2048")[1]
    assert one["images"][0]["tokens"] <= 2
    other = ask(run, seer, "describe", files[0], "--question", "What shape is it?", "--pixels", "2048")[1]
    assert one["usage"]["prompt"] == other["usage"]["prompt"] + 1, "a letter is a token"


def test_generate_takes_pictures_before_its_prompt_and_in_ids(run: Run, seer: Path, files: list[str]):
    options = ("--image", files[0], "--image", files[1])
    asked = ask(run, seer, "generate", "Describe these pictures.", *options)[1]
    assert asked["ids"] == ask(run, seer, "describe", *files)[1]["ids"]
    image = image_token(seer)
    status, document = ask(run, seer, "generate", "--ids", f"5,{image},6,{image},7,8,9", *options)
    assert status == 0
    assert document["usage"]["prompt"] == 5 + 6 + 20
    assert [one["tokens"] for one in document["images"]] == [6, 20]
    choices = ask(run, seer, "generate", "what is it?", "--image", files[0], "--n", "2")[1]
    assert (len(choices["choices"]), len(choices["images"])) == (2, 1)
    assert "images" not in ask(run, seer, "generate", "hello")[1]


def test_score_leaves_rows_of_pictures_out(run: Run, seer: Path, files: list[str]):
    image = image_token(seer)
    status, document = run(
        "score", "--ids", f"5,6,{image},7,8", "--image", files[0], "--model", str(seer), "--context", "256"
    )
    assert status == 0
    assert document["tokens"] == 4 + 6
    assert [one is None for one in document["logprobs"]] == [False, *[True] * 6, False, False]
    known = [one for one in document["logprobs"] if one is not None]
    assert document["perplexity"] == pytest.approx(math.exp(-sum(known) / len(known)))
    assert document["images"][0]["tokens"] == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("describe", "gone.png"), "the picture gone.png cannot be read"),
        (("describe", "{folder}/notes.png"), "notes.png is not a picture that can be decoded"),
        (("describe", "{folder}/empty.png"), "the picture empty.png is empty"),
        (("describe", "{folder}/thin.png"), "ratio of 201 : 1"),
        (("describe", "{one}", "--pixels", "10"), "--pixels is 10; this model reads pictures of at least 1,024 pixels"),
        (("generate", "say <|image_pad|>", "--image", "{one}"), "a message has <|image_pad|> in it"),
        (("generate", "say <|vision_start|>"), "a message has <|vision_start|> in it"),
        (("generate", "--ids", "5,6", "--image", "{one}"), "0 runs of image tokens, but 1 pictures"),
        (("describe", "{folder}/large.png", "--pixels", "1000000"), "and the context is 256; use fewer --pixels"),
        (("score", "--text-file", "{folder}/notes.png", "--image", "{one}"), "--image goes with --ids"),
    ],
)
def test_what_is_wrong_is_named(run: Run, seer: Path, files: list[str], arguments: tuple[str, ...], words: str):
    folder = Path(files[0]).parent
    (folder / "notes.png").write_text("a list of things")
    (folder / "empty.png").write_bytes(b"")
    (folder / "thin.png").write_bytes(encoded(pillow(drawn(2010, 10))))
    (folder / "large.png").write_bytes(encoded(pillow(drawn(700, 700))))
    named = [argument.format(folder=folder, one=files[0]) for argument in arguments]
    status, document = run(*named, "--model", str(seer), "--context", "256")
    assert status in (1, 2)
    assert words in document["error"]["message"]


def test_a_model_that_only_writes_says_so(run: Run, files: list[str]):
    status, document = run("describe", files[0], "--model", "tiny")
    assert status == 1
    assert "tiny reads no pictures: model_type 'qwen3' has none; models that see are" in document["error"]["message"]
