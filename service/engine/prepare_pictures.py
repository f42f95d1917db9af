"""Puts the pictures of a request in its prompt. All that can be refused is refused before any is resized."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import Request
from ..errors import Field, ModelError, RequestError
from ..model.positions import expand
from .picture_reader import PictureReader, PictureTask

# The tokens around pictures in a template's text. In a user's text they would mean a picture that does not exist.
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def place_pictures(
    request: Request, ids: Sequence[int], reader: PictureReader | None, context: int
) -> tuple[list[int], PictureTask | None]:
    """The prompt's ids with a row for every token of every picture, and the pictures; `ids` have one token per picture.

    Raises RequestError for pictures that do not fit or whose places do not match, ModelError where the model does not
    see.
    """
    pictures = request.pictures
    if not pictures:
        _refuse_marks(request, ids, reader)
        return list(ids), None
    if reader is None:
        raise ModelError("this model reads no pictures")
    plan = reader.plan
    _refuse_marks(request, ids, reader)
    sizes = reader.sizes(pictures, request.pixels)
    spans = [span for _, span in sizes]
    try:
        found, positions = expand(ids, plan.config.image, [(span.height, span.width) for span in spans])
    except ValueError as error:
        raise RequestError(
            f"{error}: the image token {plan.config.image} must stand once per picture in the prompt; "
            + ("the chat template writes none for pictures" if request.messages else "give as many of them as pictures")
        ) from None
    if len(found) >= context:
        rows = sum(span.tokens for span in spans)
        raise RequestError(
            f"the prompt has {len(found)} tokens, {rows} of them for {len(pictures)} pictures, and the context is "
            f"{context}; use fewer ",
            *(Field("pixels"), " per picture or open the model with a larger ", Field("context")),
        )
    last = positions.spans[-1].end
    if reader.key_block > 1 and len(found) - last < reader.key_block:
        raise RequestError(
            f"the prompt ends {len(found) - last} tokens after a picture; this model needs {reader.key_block}: "
            "add some text"
        )
    return found, reader.task(pictures, [preprocessor for preprocessor, _ in sizes], positions)


def _refuse_marks(request: Request, ids: Sequence[int], reader: PictureReader | None) -> None:
    """Refuse texts with the tokens of pictures: a user must not make picture rows by typing."""
    if reader is None or not reader.sees:
        return
    for message in request.messages:
        for mark in MARKS:
            if mark in message.content or mark in message.reasoning:
                raise RequestError(f"a message has {mark} in it, which stands for a picture; remove it")
    image = reader.plan.config.image
    if not request.pictures and image in ids:
        raise RequestError(
            f"the prompt has the image token {image} at position {list(ids).index(image)}, but no picture; remove it"
        )
