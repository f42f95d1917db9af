"""The real tokenizers, ours and transformers' over the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qwen_tokenizers
from onedesk.service.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session", params=qwen_tokenizers.NAMES)
def real_folder(request: pytest.FixtureRequest) -> Path:
    """Folder of a real tokenizer; each in turn."""
    return qwen_tokenizers.real_tokenizer(request.param)


@pytest.fixture(scope="session")
def tokenizer(real_folder: Path) -> Tokenizer:
    """A real tokenizer as Onedesk reads it."""
    return load_tokenizer(real_folder)


@pytest.fixture(scope="session")
def oracle(real_folder: Path) -> Any:
    """The same tokenizer as transformers reads it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(real_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def qwen3() -> Tokenizer:
    """The real Qwen3 tokenizer, where one is enough."""
    return load_tokenizer(qwen_tokenizers.real_tokenizer("qwen3"))
