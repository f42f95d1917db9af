from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.text.detokenizer import HOLD_LIMIT, ClusterHold, Detokenizer
from onedesk.service.text.tokenizer import Tokenizer

RELAXED = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FAMILY = "👨‍👩‍👧‍👦"
CLUSTERS = [FAMILY, "👩🏽‍🚀", "🏳️‍🌈", "👩🏻‍❤️‍💋‍👨🏿", "❤️", "☺️", "🇩🇪", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "👍🏿", "😀", "⌚", "✂️", "⛹🏾‍♀️", "🧑‍🤝‍🧑"]


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


@functools.cache
def single_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The first 256 tokens of a byte-level vocabulary are the single bytes."""
    return {tokenizer.token_bytes(token): token for token in range(256)}


@RELAXED
@given(data=st.data())
def test_pieces_of_any_ids_join_to_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 50), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@RELAXED
@given(data=st.data())
def test_pieces_of_any_bytes_join_to_the_whole_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    raw = data.draw(
        st.lists(
            st.one_of(st.binary(max_size=5), st.text(max_size=3).map(lambda t: t.encode("utf-8", "ignore"))),
            max_size=10,
        )
    )
    of = single_bytes(tokenizer)
    ids = [of[bytes([byte])] for part in raw for byte in part]
    assert "".join(pieces_of(tokenizer, ids)) == b"".join(raw).decode("utf-8", "replace")


@RELAXED
@given(
    text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40).map(
        lambda text: text.replace("\ufffd", "")
    )
)
def test_no_piece_of_a_text_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    assert all("\ufffd" not in piece for piece in pieces_of(tokenizer, tokenizer.encode(text)))


def test_an_emoji_waits_for_its_last_byte(qwen3: Tokenizer) -> None:
    of = single_bytes(qwen3)
    ids = [of[bytes([byte])] for byte in "a😀é".encode()]
    assert pieces_of(qwen3, ids) == ["a", "", "", "", "😀", "", "é", ""]


def test_invalid_bytes_are_shown_at_once(qwen3: Tokenizer) -> None:
    of = single_bytes(qwen3)
    ids = [of[b"\xf0"], of[b"\x9f"], of[b"A"], of[b"\xff"], of[b"\xe4"], of[b"\xbd"]]
    assert pieces_of(qwen3, ids) == ["", "", "\ufffdA", "\ufffd", "", "", "\ufffd"]


def test_a_control_token_inside_a_character_does_not_break_it(qwen3: Tokenizer) -> None:
    of = single_bytes(qwen3)
    ids = [of[b"\xc3"], min(qwen3.control_ids), of[b"\xa9"]]
    assert pieces_of(qwen3, ids) == ["", "", "é", ""]


def test_each_token_is_decoded_once(qwen3: Tokenizer) -> None:
    class Counting(Tokenizer):
        def __init__(self) -> None:
            self.control_ids, self.size, self.asked = qwen3.control_ids, qwen3.size, 0

        def token_bytes(self, token: int) -> bytes:
            self.asked += 1
            return qwen3.token_bytes(token)

    counting = Counting()
    ids = qwen3.encode("你好 world 👨‍👩‍👧‍👦 " * 500)
    assert "".join(pieces_of(counting, ids)) == qwen3.decode(ids)
    assert counting.asked == len(ids)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("after", ["", " x", "\n", "你", "😀", FAMILY, "🇫🇷"])
def test_an_emoji_is_never_shown_in_pieces(cluster: str, after: str) -> None:
    hold = ClusterHold()
    text = "ab " + cluster + after
    pieces = [hold.push(character) for character in text] + [hold.finish()]
    assert "".join(pieces) == text
    assert cluster in next(piece for piece in pieces if cluster[0] in piece)
    borders = {len("".join(pieces[: n + 1])) for n in range(len(pieces))}
    assert not borders & set(range(4, 3 + len(cluster)))


@pytest.mark.parametrize(
    "text", ["plain ASCII, 123!", "你好，世界", "é e\u0301 ñ", "한국어", "हिन्दी", "עברית", "\u200b\ufeff"]
)
def test_plain_text_is_never_late(text: str) -> None:
    hold = ClusterHold()
    assert [hold.push(character) for character in text] == list(text)


def test_a_flag_is_shown_when_its_second_letter_is_there() -> None:
    hold = ClusterHold()
    assert [hold.push(letter) for letter in "🇩🇪🇫🇷🇯"] == ["", "🇩🇪", "", "🇫🇷", ""]
    assert hold.finish() == "🇯"


@pytest.mark.parametrize("endless", ["\u200d", "👨\u200d", "🏿", "\ufe0f", "\U000e0061", "🇩", "x\u200d"])
def test_what_is_held_has_a_bound(endless: str) -> None:
    hold = ClusterHold()
    text, shown = "", ""
    for _ in range(200):
        text += endless
        shown += hold.push(endless)
        assert len(text) - len(shown) <= HOLD_LIMIT + len(endless)
    assert shown + hold.finish() == text


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*CLUSTERS, "a", " ", "\u200d", "\ufe0f", "🇩", "你", "1\ufe0f\u20e3"]), max_size=12),
    data=st.data(),
)
def test_holding_loses_nothing(parts: list[str], data: st.DataObject) -> None:
    text, hold, shown = "".join(parts), ClusterHold(), []
    while text:
        length = data.draw(st.integers(1, len(text)))
        shown.append(hold.push(text[:length]))
        text = text[length:]
    assert "".join([*shown, hold.finish()]) == "".join(parts)
