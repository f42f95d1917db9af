"""Vectors of an embedding model as Qwen publishes them: no output matrix, bare names, an end token that the
tokenizer adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from onedesk.service.errors import ModelError
from onedesk.service.registry import Registry
from openai import OpenAI
from oracle import load_model
from script_models import write_script_model
from serving import MODEL, Server, write_tree

TEXTS = ["a cat", "a cat on a mat, and nothing else", "猫"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    tree = write_tree(folder, context=2048)
    write_script_model(tree / "models" / "embedder", ("x y",), pools_end=True, head=False)
    made = Server(tree).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


def vectors(client: OpenAI, given: Any, **options: Any) -> tuple[list[list[float]], int]:
    answer = client.embeddings.create(**{"model": "embedder", "input": given, "encoding_format": "float", **options})
    return [entry.embedding for entry in answer.data], answer.usage.prompt_tokens


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def test_a_text_is_pooled_from_its_single_end_token(client: OpenAI, folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "models" / "embedder" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for text in TEXTS:
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        (by_text,), count = vectors(client, text)
        (by_ids,), _ = vectors(client, [*bare, end])
        (without,), _ = vectors(client, bare)
        assert by_text == by_ids != without
        assert count == len(bare) + 1
    assert vectors(client, "a<|endoftext|>")[1] == 3  # as in transformers: its own, and the one that is added


def test_vectors_are_those_of_transformers(client: OpenAI, folder: Path) -> None:
    source = folder / "models" / "embedder"
    model = load_model(source).model
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    found, _ = vectors(client, TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            state = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
        assert cosine((state / state.norm()).tolist(), vector) >= 0.9999


def test_fewer_dimensions_are_the_first_ones_of_length_one(client: OpenAI) -> None:
    (whole,), _ = vectors(client, "a cat")
    (cut,), _ = vectors(client, "a cat", dimensions=32)
    length = math.sqrt(cosine(whole[:32], whole[:32]))
    assert cut == pytest.approx([value / length for value in whole[:32]], abs=1e-6)
    assert cosine(cut, cut) == pytest.approx(1)


def test_an_instruction_stands_before_the_text_of_a_query(client: OpenAI) -> None:
    asked = {"instruction": "Find the animal"}
    assert vectors(client, "a cat", extra_body=asked) == vectors(client, "Instruct: Find the animal\nQuery:a cat")
    with pytest.raises(openai.BadRequestError, match="instruction goes with texts"):
        vectors(client, [1, 2], extra_body=asked)


def test_a_model_without_an_output_matrix_writes_nothing(client: OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "hi"}]
    words = r"embedder has no output matrix \(lm_head\), so it gives vectors and writes no text"
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="embedder", messages=hello)
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(model="embedder", prompt="a cat", echo=True, max_tokens=0, logprobs=1)


def test_a_chat_model_has_no_end_token_to_add(client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input="a cat")
    assert answer.usage.prompt_tokens == len("a cat")


def test_only_an_embedding_model_may_lack_its_output_matrix(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_script_model(tmp_path / "models" / "cut", ("x y",))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    registry = Registry()
    with pytest.raises(ModelError, match=r"lacks the tensor lm_head\.weight"):
        registry.open(folder, context=64)
    (folder / "modules.json").write_text("[]")  # as sentence-transformers saves one
    model = registry.open(folder, context=64)
    assert len(model.embed(model.encode_for_vector("a cat"))) == model.hidden_size
    registry.close()
