"""Which models are served by name, and what becomes of one whose files go away."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from asking import ask, run
from kept_kernels import keep_kernels
from onedesk.service import config as config_module
from onedesk.service.api import OpenModel
from onedesk.service.config import load_config
from onedesk.service.core import ModelSpec
from onedesk.service.errors import FileError
from onedesk.service.registry import Registry
from onedesk.service.server.error_documents import ApiError
from onedesk.service.server.models import Models, ServedModels
from tiny_models import write_language_model


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture
def served(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Models:
    """The models `other` and `writer` of the tree `tmp_path`, without the toys of the checkout."""
    monkeypatch.setattr(config_module, "package_folder", lambda: tmp_path / "nowhere")
    for number, name in enumerate(("other", "writer")):
        write_language_model(tmp_path / "models" / name, seed=number, context=256)
    keep_kernels(tmp_path / "cache")
    (tmp_path / "onedesk.toml").write_text('[models]\ndefault = "writer"\n', encoding="utf-8")
    config = load_config(tmp_path / "onedesk.toml")
    registry.configure(config)
    return Models(config, registry, ServedModels(usual=ModelSpec("", device="cpu")))


def found(served: Models, name: str, context: int | None = None) -> OpenModel:
    """As a request finds its model."""
    return served.find(replace(served.spec(name), context=context))[1]


@pytest.mark.parametrize("empty", [False, True], ids=["folder gone", "folder empty"])
def test_a_model_without_files_is_not_found_and_released(
    served: Models, registry: Registry, tmp_path: Path, empty: bool
) -> None:
    forms = [found(served, "writer"), found(served, "writer", 64), found(served, "other")]
    for model in forms:
        model.load()
    used = registry.pool("cpu").used()
    held = sum(model.held_bytes() for model in forms[:2])
    assert held > 0
    shutil.rmtree(tmp_path / "models" / "writer")
    if empty:
        (tmp_path / "models" / "writer").mkdir()
    for _ in range(2):
        with pytest.raises(ApiError, match="there is no model 'writer'; the models: 'other'") as caught:
            served.name_of("writer")
        assert caught.value.status == 404
    assert registry.models() == [forms[2]]
    assert registry.pool("cpu").used() == used - held
    assert found(served, "other") is forms[2]


def test_a_removed_model_finishes_its_answer_first(served: Models, registry: Registry, tmp_path: Path) -> None:
    model = found(served, "writer")
    model.load()
    with closing(model.generate(ask(max_tokens=8))) as events:
        next(events)
        shutil.rmtree(tmp_path / "models" / "writer")
        for _ in range(2):
            with pytest.raises(ApiError, match="there is no model"):
                served.name_of("writer")
        assert [event.result.finish for event in events if event.result] == ["length"]
    assert registry.models() == [model]
    assert [entry.name for entry in served.entries()] == ["other"]
    assert registry.models() == []
    assert model.held_bytes() == 0


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_model_whose_settings_alone_changed_is_opened_anew(
    served: Models, registry: Registry, tmp_path: Path, file: str
) -> None:
    old, other = found(served, "writer"), found(served, "other")
    before = run(old, ask(max_tokens=8))[1].ids
    change = {"rms_norm_eps": 0.5} if file == "config.json" else {"eos_token_id": before[2]}
    settings = tmp_path / "models" / "writer" / file
    document = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
    settings.write_text(json.dumps(document | change), encoding="utf-8")
    assert (old.stale, other.stale) == (True, False)
    new = found(served, "writer")
    assert new is not old
    assert not old.loaded
    assert run(new, ask(max_tokens=8))[1].ids != before
    assert found(served, "writer") is new
    assert old not in registry.models()


def test_a_default_that_is_broken_gives_its_bytes_back_too(served: Models, registry: Registry, tmp_path: Path) -> None:
    model = found(served, "")
    run(model, ask(max_tokens=2))
    (tmp_path / "models" / "writer" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(FileError, match=r"model\.safetensors"):
        found(served, "")
    assert registry.models() == []
    assert model.held_bytes() == 0


class Looks:
    """Counts the looks at a file of a model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.count, real = 0, Path.stat

        def stat(path: Path, **options: bool) -> os.stat_result:
            self.count += path.name == name
            return real(path, **options)

        monkeypatch.setattr(Path, "stat", stat)


def test_an_open_model_is_found_with_one_file_check(served: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = [found(served, name, context) for name in ("writer", "other") for context in (None, 64)]
    for looks in (Looks(monkeypatch, "config.json"), Looks(monkeypatch, "tokenizer.json")):
        before = looks.count
        assert found(served, "writer", 64) is opened[1]
        assert looks.count == before + 1
