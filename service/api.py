"""The public Python API: open a model, use it, close it. Nodes, the command and the service are wrappers of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .config import load_config
from .core import (
    QUANTIZATIONS,
    CancelCheck,
    Event,
    Logprobs,
    Message,
    Picture,
    ProgressReport,
    Request,
    Thinking,
)
from .engine.batch import Accounting, Controls
from .engine.batch_loop import BatchLoop
from .engine.completion import Prepared, cancelled_result
from .engine.leaks import LeakReport
from .engine.picture_reader import PictureReader
from .engine.prepare import check_ids, prepare, prepare_all, require_head
from .engine.prepare_pictures import place_pictures
from .engine.reranking import PairPrompts, relevances
from .engine.scoring import block_count, score_windows
from .engine.session import Blueprint, Session, draw_blueprint, pick_context, pick_device
from .engine.session_owner import SessionOwner
from .engine.stages import StageMeter, stages_line
from .errors import Cancelled, Field, Named, OnedeskError, RequestError
from .loader.checkpoint import Checkpoint, open_checkpoint
from .loader.names import ModelRoots
from .memory.budget import Need
from .memory.policy import Policy
from .memory.pool import Pool, Released
from .memory.read_bandwidth import known_ceiling
from .peers.remote import RemoteModel
from .text.conversation import render_conversation
from .text.language import Language
from .text.template import ChatTemplate
from .text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The events of a run. Closing the generator stops the run and frees the model at once.
Events = Generator[Event, None, None]


class OpenModel:
    """A handle of one model, loaded at its first use and again after an eviction. May be shared between threads.

    One run at a time; others wait. Made by `open_model`.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        blueprint: Blueprint,
        pool: Pool,
        kernel_cache: Path,
        whole: Checkpoint | None = None,
        language: Language | None = None,
    ) -> None:
        """`whole`: the checkpoint with its vision tower, of which `blueprint` has the text network. `language`: the
        tokenizer and template of another handle of the same checkpoint, to share."""
        self.name = name
        self.path = path
        self.pool = pool
        self._blueprint = blueprint
        # The machine's read bandwidth in bytes per second; None until it was measured.
        self.read_ceiling = known_ceiling(kernel_cache, torch.device(pool.device).type)
        # For the host application, such as ComfyUI's patcher; not used here.
        self.companion: object = None
        self.language = language or Language(blueprint.checkpoint.folder)
        indexer = blueprint.config.indexer
        key_block = indexer.ratio if indexer else 1
        self.reader = PictureReader(
            name, whole or blueprint.checkpoint, pool, blueprint.device, kernel_cache, key_block
        )
        self._owner = SessionOwner(name, blueprint, pool, kernel_cache, self.reader)

    @property
    def sees(self) -> bool:
        """Whether it reads pictures."""
        return self.reader.sees

    def picture_sizes(self, pictures: Sequence[Picture], pixels: int | None = None) -> list[tuple[int, int, int]]:
        """Width and height after resizing, and tokens, of each picture. Raises RequestError, ModelError without
        vision."""
        sizes = [(one.factor, span) for one, span in self.reader.sizes(pictures, pixels)]
        return [(span.width * side, span.height * side, span.tokens) for side, span in sizes]

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._blueprint.context

    @property
    def vocab_size(self) -> int:
        return self._blueprint.widths.vocab

    @property
    def hidden_size(self) -> int:
        return self._blueprint.widths.hidden

    @property
    def layers(self) -> int:
        return self._blueprint.config.layers

    @property
    def need(self) -> Need:
        """Bytes that the model needs while it is loaded."""
        return self._blueprint.need

    @property
    def weight_format(self) -> str:
        """The formats of the matrices, the largest share first, such as "BF16" or "int4-g128+int8"."""
        return self._blueprint.plan.form

    @property
    def policy(self) -> Policy:
        """When the model is evicted without a request."""
        return self._owner.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._owner.policy = policy

    @property
    def session(self) -> Session | None:
        """The engine's session while the model is loaded: for tests and measurements."""
        return self._owner.session

    @property
    def loaded(self) -> bool:
        return self.session is not None

    @property
    def stale(self) -> bool:
        """Whether it cannot load again: it was closed, or a file that it loads from has changed since the handle was
        made."""
        return (
            self._owner.closed
            or self.language.changed()
            or self._blueprint.checkpoint.changed()
            or self._blueprint.plan.changed()
        )

    @property
    def busy(self) -> bool:
        """Whether a run or a load is in progress."""
        return self._owner.busy

    @property
    def kernels(self) -> str:
        """The kernels in use and why; empty while the model is not loaded."""
        return self.session.kernels if self.session else ""

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ModelError when there is none."""
        return self.language.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template. Raises ModelError when there is none."""
        return self.language.template

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, control tokens recognized."""
        return self.tokenizer.encode(text)

    def encode_conversation(self, messages: Sequence[Message], thinking: Thinking = "auto") -> list[int]:
        """Token ids of the conversation as the model's prompt; texts of control tokens in messages stay text."""
        language = self.language
        return list(render_conversation(language.template, language.added_tokens, messages, thinking=thinking).ids)

    def encode_for_vector(self, text: str, instruction: str = "") -> list[int]:
        """Token ids of `text` for `embed`: with the end token that the tokenizer's post-processor adds, and after the
        instruction of a query where one is given, in the form that Qwen's embedding models are trained on."""
        return self.tokenizer.encode_for_pooling(f"Instruct: {instruction}\nQuery:{text}" if instruction else text)

    def render(self, messages: Sequence[Message], thinking: Thinking = "auto") -> str:
        """The conversation as the model's prompt."""
        return self.template.render(messages, thinking=thinking)

    def held_bytes(self) -> int:
        """Bytes leased now."""
        session = self.session
        return (session.held_bytes() if session else 0) + self.reader.held_bytes()

    @property
    def kv_blocks(self) -> tuple[int, int, int]:
        """KV blocks that are used or reserved, that only the prefix cache holds, and in total; zeros while it is not
        loaded."""
        kv = getattr(self.session.runner, "kv", None) if self.session else None
        return (kv.blocks - kv.available, kv.cold, kv.blocks) if kv is not None else (0, 0, 0)

    def leak_report(self) -> LeakReport:
        """Memory that each stage of the last uses left in the process, and the stage that grows, if one does."""
        return self._owner.leak_report()

    def weight_checksums(self) -> dict[str, int]:
        """A CRC-32 of each tensor in memory, by its name in the checkpoint, in the order of use."""
        with self._owner.exclusive(None), self._owner.opened(None, None) as session:
            session.settle()
            return session.checksums(self._blueprint.plan)

    def load(self, *, progress: ProgressReport | None = None, cancel: CancelCheck | None = None) -> None:
        """Load the model and wait until it is in memory. Raises Cancelled, MemoryFull, FileError."""
        self._owner.load(progress, cancel)

    def generate(
        self, request: Request, *, cancel: CancelCheck | None = None, progress: ProgressReport | None = None
    ) -> Events:
        """Answer `request` as a stream of events; the last one of each of its choices has the result.

        Everything that can be refused is refused here, before any work: RequestError, ModelError. `cancel` is asked
        before every token and every layer of a prompt chunk; the partial text is kept and the result says "cancelled".
        `progress` is called during a load and for every prompt chunk.
        """
        return self.generate_batch([request], cancel=cancel, progress=progress)

    def generate_batch(
        self,
        requests: Sequence[Request],
        *,
        cancel: CancelCheck | None = None,
        cancel_request: Callable[[int], bool] | None = None,
        progress: ProgressReport | None = None,
    ) -> Events:
        """As `generate` for several requests in one batch; each event has the numbers of its request and choice.

        Each choice is what it would be alone. Its scores depend on the other rows only in the last bits, where a device
        sums in another order for other numbers of rows. The requests start in the order of the list; up to 8 choices
        decode at once if the KV cache has blocks for them, and the others follow. One invalid item refuses the list,
        and is named. One that fails during the run ends alone, and its error is raised when the others have ended.
        `cancel_request` is called with a request's number in the list; true cancels that request, and its blocks are
        free at once.
        """
        controls = Controls(cancel, cancel_request, progress)
        with Named("preparing a request"):
            # Without `cancel`: a cancelled choice has a result, which needs the prepared request.
            prepared = prepare_all(requests, self._blueprint, self.language, None, self.reader)
        return self._whole(self._run(prepared, controls))

    def _whole(self, events: Events) -> Events:
        """`events`, and after them the first error of a request that failed alone."""
        failed: OnedeskError | None = None
        for event in events:
            failed = failed or event.error
            if event.error is None:
                yield event
        if failed is not None:
            raise failed

    def prepared(self, request: Request, *, cancel: CancelCheck | None = None) -> Prepared:
        """`request` checked, for `serve`. Raises RequestError, ModelError, Cancelled."""
        with Named("preparing a request"):
            return prepare(request, self._blueprint, self.language, cancel, self.reader)

    def serve(
        self,
        arrivals: Callable[[], Sequence[Prepared]],
        *,
        cancel: CancelCheck | None = None,
        cancel_request: Callable[[int], bool] | None = None,
        progress: ProgressReport | None = None,
    ) -> Events:
        """As `generate_batch` for requests that arrive during the run: before every step `arrivals` returns the new
        ones, which are numbered in that order. A request that fails ends alone, with an event that has its error. The
        run ends when no request is left and `arrivals` returns none."""
        return self._run((), Controls(cancel, cancel_request, progress, arrivals))

    def score(self, ids: Sequence[int], *, cancel: CancelCheck | None = None) -> list[float]:
        """log-probability of each id from the second on, of the raw model. Raises RequestError, Cancelled."""
        return [one.token for one in self.scored(ids, 0, cancel=cancel)]

    def scored(self, ids: Sequence[int], top: int, *, cancel: CancelCheck | None = None) -> list[Logprobs]:
        """As `score`, with the `top` likeliest ids at each position."""
        require_head(self._blueprint)
        self.check_fits(ids)
        with self._owner.use("score", cancel) as session:
            return session.runner.logprobs(ids, cancel, top=top)

    def score_pictures(
        self,
        ids: Sequence[int],
        pictures: Sequence[Picture],
        pixels: int | None = None,
        *,
        cancel: CancelCheck | None = None,
    ) -> list[float | None]:
        """As `score` for ids in which the image token stands once per picture: None at every row of a picture."""
        request = Request(ids=tuple(ids), images=tuple(pictures), pixels=pixels).validated()
        check_ids(ids, self.vocab_size)
        found, task = place_pictures(request, ids, self.reader, self.context)
        with self._owner.use("score", cancel) as session:
            scored = session.runner.logprobs(found, cancel, pictures=task)
        inside = {row for span in (task.positions.spans if task else ()) for row in range(span.first, span.end)}
        return [None if row in inside else one.token for row, one in enumerate(scored, 1)]

    def score_text(self, text: str, *, cancel: CancelCheck | None = None) -> tuple[list[float], int]:
        """As `score` for a text of any length, in windows that overlap by half; also returns the number of windows."""
        return score_windows(self.encode(text), self.context, lambda window: self.score(window, cancel=cancel))

    def embed_prompt(
        self,
        prompt: str | Sequence[int],
        layers: Sequence[int],
        *,
        cancel: CancelCheck | None = None,
        progress: ProgressReport | None = None,
    ) -> torch.Tensor:
        """Hidden states of `prompt` for an image model: [tokens, hidden * len(layers)] fp32 on the CPU, no final norm.

        `layers` count blocks: 9 is the state after 9 blocks, -1 after all of them, -2 after all but one. Raises
        RequestError, Cancelled.
        """
        after = [block_count(layer, self.layers, self.name) for layer in layers]
        if not after:
            raise RequestError("no layer was named; give at least one, such as -2")
        ids = list(prompt) if not isinstance(prompt, str) else self.encode(prompt)
        self.check_fits(ids)
        with self._owner.use("embed", cancel, progress) as session:
            return session.runner.states(ids, after, cancel)

    def embed(self, ids: Sequence[int], *, cancel: CancelCheck | None = None) -> list[float]:
        """The vector of a text: its last token's state after the final norm, not scaled. Raises as `embed_prompt`."""
        self.check_fits(ids)
        with self._owner.use("embed", cancel) as session:
            return session.runner.final_state(ids, cancel).tolist()

    def pair_prompts(self, query: str, instruction: str = "") -> PairPrompts:
        """The prompts that ask whether a document meets `query`. Raises RequestError without an output matrix,
        ModelError for a tokenizer without the tokens yes and no."""
        require_head(self._blueprint)
        return PairPrompts(self.tokenizer, query, instruction)

    def rank(
        self, prompts: Sequence[Sequence[int]], answers: tuple[int, int], *, cancel: CancelCheck | None = None
    ) -> list[float]:
        """The probability, 0 to 1, of the first of the ids `answers` against the second after each prompt. Raises
        Cancelled, and as `check_fits`."""
        require_head(self._blueprint)
        for ids in prompts:
            self.check_fits(ids)
        with self._owner.use("rank", cancel) as session:
            return relevances(session.runner, prompts, answers, cancel)

    def check_fits(self, ids: Sequence[int]) -> None:
        """Raise RequestError unless `ids` are one or more of the model's token ids, and no more than the context."""
        check_ids(ids, self.vocab_size)
        if len(ids) > self.context:
            raise RequestError(
                f"{len(ids)} token ids are longer than the ",
                Field("context"),
                f" of {self.context}; cut them or raise it",
            )

    def give_way(self) -> tuple[Released, ...]:
        """Evict the model and return the bytes, measured; the handle loads again at its next use.

        While a run is in progress nothing is returned.
        """
        return self._owner.give_way()

    def close(self) -> tuple[Released, ...]:
        """Return the model's bytes for good, after a run in progress has ended."""
        return self._owner.close(self.language.close)

    def _run(self, requests: Sequence[Prepared], controls: Controls) -> Events:
        started = time.perf_counter()
        meter = StageMeter(self.pool, self.read_ceiling)
        finished: set[int] = set()
        try:
            with self._owner.run(meter, controls.cancel, controls.progress) as (session, leaks):
                accounting = Accounting(meter, leaks, session.pass_bytes, session.draft_token_bytes)
                for event in BatchLoop(requests, session, accounting, controls).events(started):
                    if event.result is not None:
                        finished.add(event.request)
                        log.debug("%s, %s: %s", self.name, event.result.finish, stages_line(event.result.stages))
                    yield event
        except Cancelled:
            seconds = time.perf_counter() - started
            for number, prepared in enumerate(requests):
                if number not in finished:
                    yield from (
                        Event(result=cancelled_result(prepared, i, seconds), request=number, choice=i)
                        for i in range(prepared.n)
                    )


Model = OpenModel | RemoteModel  # in this process, or in another engine


def open_model(
    model: str | Path,
    *,
    pool: Pool,
    roots: ModelRoots | None = None,
    context: int | None = None,
    quant: str = "none",
    device: str = "auto",
    load: bool = True,
    progress: ProgressReport | None = None,
    cancel: CancelCheck | None = None,
    kernel_cache: Path | None = None,
    sequences: int = 1,
    draft: bool = True,
    language: Language | None = None,
) -> OpenModel:
    """Open `model`: a Path is opened as it is, a str is a name among `roots`. With load=False it loads at its first
    use.

    `quant`, one of core.QUANTIZATIONS: how matrices stored in floating types are held; those stored quantized stay so.
    The KV cache has blocks for `sequences` of the whole context, or for fewer if the budget is smaller. `draft`: open
    the layer for multi-token prediction too, if the checkpoint has one and it fits the budget. `language`: that of
    another handle of the same checkpoint, to share its tokenizer and the process of its template.
    Raises FileError, ModelError, RequestError, MemoryFull, all before anything is loaded; Cancelled when `cancel()`
    turns true.
    """
    if quant not in QUANTIZATIONS:
        raise RequestError(Field("quant"), f" is {quant!r}; use {', '.join(QUANTIZATIONS)}")
    path = model if isinstance(model, Path) else (roots or ModelRoots([])).resolve(model)
    checkpoint = open_checkpoint(path, roots=roots.bases if roots else ())
    for note in checkpoint.notes:
        log.warning("%s: %s", checkpoint.name, note)
    cache = kernel_cache or load_config(None).cache
    sketch = draw_blueprint(checkpoint, pick_device(device), 2, quant, cache, draft=draft)
    blueprint = replace(sketch, context=pick_context(context, sketch.config.max_position), sequences=sequences).fitted(
        pool
    )
    name = model if isinstance(model, str) else checkpoint.name
    opened = OpenModel(name, path, blueprint, pool, cache, checkpoint, language)
    if load:
        opened.load(progress=progress, cancel=cancel)
    return opened
