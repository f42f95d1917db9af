"""Pictures over HTTP: OpenAI's own client sends them as data: URLs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from onedesk.service.core import Picture
from onedesk.service.vision.encode import picture_of_uri, uri_of_picture
from openai import OpenAI
from pictures import drawn, encoded, pillow
from serving import Server, write_tree
from tiny_vision import write_seer

SEER = "seer"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tree = write_tree(tmp_path_factory.mktemp("service"), context=512)
    write_seer(tree / "models" / SEER)
    made = Server(tree).start()
    yield made
    made.stop()


@pytest.fixture
def client(seeing: Server) -> OpenAI:
    return seeing.client()


def url(picture: Picture, kind: str = "PNG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(pillow(picture), kind)).decode()}"


def ask(client: OpenAI, *parts: Any, **options: Any) -> Any:
    """An answer to these parts: texts, and URLs of pictures or what stands for them."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str) and not part.startswith("data:")
        else {"type": "image_url", "image_url": {"url": part} if isinstance(part, str) else part}
        for part in parts
    ]
    messages: Any = [{"role": "user", "content": content}]
    whole = {"model": SEER, "messages": messages, "max_tokens": 6, "temperature": 0, "seed": 1} | options
    return client.chat.completions.create(**whole)


def test_the_vision_example_of_the_client_works(client: OpenAI) -> None:
    one = ask(client, "What is in this image?", url(drawn(96, 64, 1)))
    text = ask(client, "What is in this image?")
    assert one.usage.prompt_tokens == text.usage.prompt_tokens + 2 + 6
    streamed = ask(client, "What is in this image?", url(drawn(96, 64, 1)), stream=True)
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert pieces == one.choices[0].message.content


def test_several_pictures_in_order_and_by_detail(client: OpenAI) -> None:
    one, two = url(drawn(96, 64, 1)), url(drawn(160, 128, 2), "JPEG")
    before = ask(client, "Compare them.", one, two)
    assert before.usage.prompt_tokens == ask(client, "Compare them.", two, one).usage.prompt_tokens
    large = url(drawn(700, 600, 3))
    low = ask(client, "Say it.", {"url": large, "detail": "low"}).usage.prompt_tokens
    high = ask(client, "Say it.", {"url": large, "detail": "high"}).usage.prompt_tokens
    assert low < high
    again = ask(client, "Compare them.", one, two)
    assert again.choices[0].message.content == before.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"url": "https://127.0.0.1:1/cat.png"}, "pictures are never fetched"),
        ({"url": "file:///etc/hostname"}, "pictures are never fetched"),
        ({"url": "data:image/png;base64,iVBORw0K"}, "not a picture that can be decoded"),
        ({"url": "data:application/pdf;base64,JVBERi0="}, "is not a data: URL in base64"),
        ({"detail": "low"}, "image_url.url is missing"),
        ({"url": "data:,", "detail": "fine"}, "detail is not one of low, high and auto"),
        ({"url": url(drawn(2010, 10))}, "ratio of 201 : 1"),
    ],
)
def test_what_cannot_be_read_is_refused(client: OpenAI, part: dict[str, str], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "What is it?", part)
    assert words in str(refused.value)


def test_users_cannot_type_pictures_and_send_too_many(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"a message has <\|image_pad\|> in it"):
        ask(client, "What is <|image_pad|>?")
    with pytest.raises(openai.BadRequestError, match=r"the request has 100 pictures; at most 64"):
        ask(client, "Compare them.", *[url(drawn(8, 8))] * 100)


def test_pictures_of_one_request_are_bounded_together_before_all_are_decoded(client: OpenAI) -> None:
    large = url(Picture(8000, 5000, bytes(3 * 8000 * 5000)))
    with pytest.raises(openai.BadRequestError, match=r"more than 100,000,000 pixels; send fewer or smaller"):
        ask(client, "Compare them.", *[large] * 3)


def test_the_further_apis_take_pictures_too(seeing: Server, client: OpenAI) -> None:
    one = url(drawn(96, 64, 1))
    wanted = ask(client, "What is it?", one).choices[0].message.content
    plain = {"model": SEER, "temperature": 0, "max_output_tokens": 6}
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": one, "detail": "low"}]
    status, _, document = seeing.ask("POST", "/v1/responses", plain | {"input": [{"role": "user", "content": parts}]})
    assert status == 200, document
    assert document["output"][-1]["content"][0]["text"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": one.partition(",")[2]}
    blocks = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    body = {"model": SEER, "temperature": 0, "max_tokens": 6, "messages": [{"role": "user", "content": blocks}]}
    status, _, document = seeing.ask("POST", "/v1/messages", body)
    assert status == 200, document
    assert document["content"][-1]["text"] == wanted


def test_uris_give_back_their_pictures() -> None:
    picture = drawn(40, 30)
    back = picture_of_uri(uri_of_picture(picture), "it")
    assert (back.width, back.height, back.rgb) == (40, 30, picture.rgb)
    small = picture_of_uri(uri_of_picture(picture, 300), "it")
    assert small.width * small.height <= 300
