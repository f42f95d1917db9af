"""Model folders with faults in a service: each is listed, each request to one gets a whole answer that names the
file, and others write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, Server, write_tree


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def _number(folder: Path) -> None:
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(
        text.replace("{", '{"rope_theta_of_old": 1' + "0" * 400 + ", ", 1), encoding="utf-8"
    )


def _eps(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=10**60)


def _ends(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[-5])


def _deep(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_bytes(b'{"a":' * 900 + b"1" + b"}" * 900)


def _many(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_bytes(b'{"x":[' + b"[]," * (1 << 20) + b"[]]}")


def _is_a_folder(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()


def _panics_when_loaded(folder: Path) -> None:
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    change(path, model=model | {"continuing_subword_prefix": "éé", "end_of_word_suffix": "</w>", "merges": ["a b"]})


def _panics_when_used(folder: Path) -> None:
    path = folder / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    own = json.loads(path.read_text(encoding="utf-8"))["pre_tokenizer"]
    change(path, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, own]})


# What is wrong, and what the answer to a request says of it.
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "number": (_number, "config.json has a whole number of 401 digits at 'rope_theta_of_old'"),
    "eps": (_eps, "config.json has rms_norm_eps = "),
    "ends": (_ends, "generation_config.json has eos_token_id = [-5]"),
    "deep": (_deep, "tokenizer_config.json is nested more than 64 levels deep"),
    "many": (_many, "tokenizer_config.json holds"),
    "folder": (_is_a_folder, "tokenizer.json is not a regular file"),
    "load": (_panics_when_loaded, "load/tokenizer.json cannot be read"),
    "use": (_panics_when_used, "use/tokenizer.json fails on this text"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tree = write_tree(tmp_path_factory.mktemp("tree"))
    for name, (spoil, _) in FAULTS.items():
        shutil.copytree(tree / "models" / MODEL, tree / "models" / name)
        spoil(tree / "models" / name)
    made = Server(tree).start()
    yield made
    made.stop()


def chat(server: Server, model: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "a" * 40 + "!"}], "max_tokens": 2}
    status, _, document = server.ask("POST", "/v1/chat/completions", body)
    return status, document


def test_every_broken_model_is_listed_with_the_others(server: Server):
    status, _, document = server.ask("GET", "/v1/models")
    assert status == 200
    assert {MODEL, *FAULTS} <= {row["id"] for row in document["data"]}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_model_affects_no_other_request(server: Server, name: str):
    status, document = chat(server, name)
    assert 400 <= status < 600
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert FAULTS[name][1] in document["error"]["message"]
    assert str(server.tree) not in json.dumps(document)
    assert chat(server, MODEL)[0] == 200
