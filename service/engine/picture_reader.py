"""The seeing part of an open model: pictures to rows of the decoder, by a tower on a lease of its own.

The tower is read from its files when the first picture comes, gives way alone, and wakes alone. It runs once per
picture, whatever chunks the prompt is read in; the rows of the last pictures are kept in small leases that go first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch

from ..core import PICTURES_LIMIT, CancelCheck, Picture
from ..errors import FileError, ModelError, RequestError
from ..kernels.choose import choose_kernels
from ..kernels.forward_batch import ForwardBatch, HeadShape, RotaryTable
from ..loader.checkpoint import Checkpoint
from ..loader.json_files import read_json_object
from ..memory.lease import carved_bytes
from ..memory.policy import STAY, Policy
from ..memory.pool import Lease, Pool, Released
from ..model.arrival import WeightArrival
from ..model.families import read_tower
from ..model.positions import PicturePositions, PictureSpan, turns_of
from ..model.tower import Tower, TowerScratch, build, destinations
from ..model.vision_config import SEEING, VisionConfig
from ..model.weights import WeightPlan, plan_weights
from ..vision.preprocessor import FILE, OLD_FILE, Preprocessor, read_preprocessor
from ..vision.resize import ResizedPicture, resize_picture

ALIGNMENT = 256
# Rows of pictures that are kept: 1,024 tokens of 2,560 numbers in BF16 are 5 MB, with three taps 20 MB.
KEPT_BYTES = 64 << 20
# Default pixels of a picture after resizing: a vision tower takes about a minute for a million on a CPU of 2 cores.
GPU_PIXELS, CPU_PIXELS = 1_048_576, 262_144


class PictureStopped(Exception):  # noqa: N818 - a signal inside the engine, never seen outside
    """The caller asked to stop while a picture was read."""


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """The seeing part of a checkpoint before a byte of it is read."""

    config: VisionConfig
    plan: WeightPlan
    preprocessor: Preprocessor

    def scratch_bytes(self, pixels: int, dtype: torch.dtype) -> int:
        """Bytes of buffers for a picture of `pixels`."""
        return TowerScratch.nbytes(self.config.tower, pixels // self.preprocessor.patch**2, dtype)

    def output_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the rows of a picture of `tokens`."""
        tower = self.config.tower
        return carved_bytes((1 + len(tower.taps), tokens, tower.out), dtype)


def plan_vision(checkpoint: Checkpoint) -> VisionPlan:
    """Check the tower and the preprocessor of a checkpoint. Raises ModelError that says why the model does not see."""
    found = read_tower(checkpoint)
    if found is None:
        kind = str(checkpoint.config.get("model_type"))
        why = (
            "its files hold no tower (visual.*)"
            if "vision_config" in checkpoint.config
            else f"model_type {kind!r} has none"
        )
        raise ModelError(f"{checkpoint.name} reads no pictures: {why}; models that see are {', '.join(sorted(SEEING))}")
    vision, files = found
    path = next((path for name in (FILE, OLD_FILE) if (path := checkpoint.folder / name).is_file()), None)
    if path is None:
        raise ModelError(
            f"{checkpoint.name} has no {FILE}, which says how pictures are resized; "
            "get it from the model's own repository"
        )
    preprocessor = read_preprocessor(read_json_object(path, path.name), file=path.name)
    tower = vision.tower
    for key, stated, needed in (
        ("patch_size", preprocessor.patch, tower.patch),
        ("merge_size", preprocessor.merge, tower.merge),
        ("temporal_patch_size", preprocessor.frames, tower.frames),
    ):
        if stated != needed:
            raise ModelError(
                f"{path.name} has {key} = {stated} and the tower of config.json {needed}; get both from one repository"
            )
    return VisionPlan(vision, plan_weights(destinations(tower), files), preprocessor)


def vision_figures(checkpoint: Checkpoint, device: torch.device) -> dict[str, int] | None:
    """What reading pictures takes: bytes of the tower, and for a picture of the usual `pixels` its tokens and bytes of
    scratch.

    None where the model reads none.
    """
    try:
        plan = plan_vision(checkpoint)
    except (ModelError, FileError):
        return None
    dtype = plan.plan.dtype if device.type == "cuda" else torch.float32
    pixels = usual_pixels(plan.preprocessor, device)
    tokens = pixels // plan.preprocessor.factor**2
    return {
        "tower": plan.plan.nbytes,
        "pixels": pixels,
        "tokens": tokens,
        "scratch": plan.scratch_bytes(pixels, dtype) + plan.output_bytes(tokens, dtype),
    }


def usual_pixels(preprocessor: Preprocessor, device: torch.device) -> int:
    """The default limit of pixels per picture."""
    return max(preprocessor.min_pixels, GPU_PIXELS if device.type == "cuda" else CPU_PIXELS)


@dataclass(frozen=True, slots=True)
class PictureTask:
    """The pictures of one prompt: where their rows stand, and their pixels."""

    reader: PictureReader
    positions: PicturePositions
    pictures: tuple[ResizedPicture, ...]

    def keys(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids with every row of a picture replaced by a number that stands for its pixels: what a kept prefix is
        known by.

        The numbers are below 0, so that no id is one of them.
        """
        found = list(ids)
        for span, picture in zip(self.positions.spans, self.pictures, strict=True):
            for row in range(span.tokens):
                digest = blake2b(picture.digest + row.to_bytes(8, "little"), digest_size=8).digest()
                found[span.first + row] = -1 - (int.from_bytes(digest, "little") >> 1)
        return tuple(found)

    @contextmanager
    def rows(self, batch: ForwardBatch, first: int, rotary: RotaryTable, cancel: CancelCheck | None) -> Iterator[None]:
        """Let a chunk that begins at row `first` know how its rows are turned, and what stands for its pictures.

        Raises PictureStopped when `cancel` turns true while the tower reads.
        """
        last = first + batch.positions.shape[0]
        device = batch.positions.device
        turns = turns_of(self.positions, first, last, rotary.positions, self.reader.key_block)
        rotary.turn_axes(turns.axes)
        batch.turns, batch.first_turns = turns.turns.to(device), turns.first_turns.to(device)
        with ExitStack() as held:
            found = []
            for number, rows, own in self.positions.within(first, last):
                output = held.enter_context(self.reader.output(self.pictures[number], cancel))
                found.append((rows, output[:, own]))
            batch.pictures = found
            yield


@dataclass(slots=True)
class _Awake:
    """The tower in memory, and the leases that it is in."""

    tower: Tower
    leases: tuple[Lease, ...]


@dataclass(slots=True)
class _Output:
    lease: Lease
    rows: torch.Tensor


class PictureReader:
    """The tower of one open model. One picture is read at a time; `give_way` may be called from any thread."""

    def __init__(
        self,
        owner: str,
        checkpoint: Checkpoint,
        pool: Pool,
        device: torch.device,
        kernel_cache: Path,
        key_block: int = 1,
    ) -> None:
        """`key_block`: rows of the decoder's indexer that are chosen together, 1 without."""
        self.key_block = key_block
        self._owner, self._checkpoint, self._pool = owner, checkpoint, pool
        self._device, self._kernel_cache = device, kernel_cache
        self._lock = threading.Lock()
        self._awake: _Awake | None = None
        self._outputs: OrderedDict[bytes, _Output] = OrderedDict()
        self._policy: Policy = STAY
        # How often the tower was run: a picture whose rows are kept, or stand in a kept prefix, is not read again.
        self.runs = 0

    @cached_property
    def plan(self) -> VisionPlan:
        """Raises ModelError that says why the model does not see."""
        return plan_vision(self._checkpoint)

    @cached_property
    def sees(self) -> bool:
        """Whether the model reads pictures."""
        try:
            return bool(self.plan.plan.tensors)
        except (ModelError, FileError):
            return False

    @property
    def dtype(self) -> torch.dtype:
        """Of the tower's activations and of the rows."""
        return self.plan.plan.dtype if self._device.type == "cuda" else torch.float32

    def held_bytes(self) -> int:
        """Bytes of all leases."""
        awake, outputs = (
            self._awake,
            list(self._outputs.values()),
        )  # without the lock: the tower may hold it for seconds
        return sum(lease.nbytes for lease in (*(awake.leases if awake else ()), *(one.lease for one in outputs)))

    def sizes(self, pictures: Sequence[Picture], pixels: int | None) -> list[tuple[Preprocessor, PictureSpan]]:
        """The preprocessing of each picture within `pixels`, and what it takes, before any is resized. Raises
        RequestError."""
        if len(pictures) > PICTURES_LIMIT:
            raise RequestError(f"the request has {len(pictures)} pictures; at most {PICTURES_LIMIT} are read at once")
        whole = self.plan.preprocessor
        usual = usual_pixels(whole, self._device)
        found = []
        for picture in pictures:
            preprocessor = whole.with_pixels(picture.pixels or pixels or usual)
            height, width = preprocessor.target_size(picture.height, picture.width, picture.name)
            found.append((preprocessor, PictureSpan(0, height // whole.factor, width // whole.factor)))
        return found

    def task(
        self, pictures: Sequence[Picture], preprocessors: Sequence[Preprocessor], positions: PicturePositions
    ) -> PictureTask:
        """Resize the pictures of one prompt."""
        return PictureTask(self, positions, tuple(map(resize_picture, pictures, preprocessors)))

    @contextmanager
    def output(self, picture: ResizedPicture, cancel: CancelCheck | None) -> Iterator[torch.Tensor]:
        """[1 + taps, tokens, hidden] of a picture, valid until the block ends. Raises PictureStopped, MemoryFull,
        FileError."""
        with self._lock:
            found = self._outputs.get(picture.digest)
            if found is None:
                found = self._read(picture, cancel)
                self._outputs[picture.digest] = found
            self._outputs.move_to_end(picture.digest)
            self._drop_old()
            using = found.lease.using()
            using.__enter__()
        try:
            yield found.rows
        finally:
            using.__exit__(None, None, None)

    def offer(self, policy: Policy) -> None:
        """Say on which terms the leases are held from now on."""
        self._policy, awake = policy, self._awake
        for lease in awake.leases if awake else ():
            if not lease.released:
                lease.offer(self.give_way, policy=policy)

    def give_way(self) -> tuple[Released, ...]:
        """Return the tower's bytes unless it reads a picture now; it wakes when the next one comes."""
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            return self._sleep()
        finally:
            self._lock.release()

    def release(self) -> tuple[Released, ...]:
        """Return everything."""
        with self._lock:
            kept = [self._outputs.pop(digest).lease for digest in list(self._outputs)]
            return (*self._sleep(), *(lease.release() for lease in kept))

    def _sleep(self) -> tuple[Released, ...]:
        awake, self._awake = self._awake, None
        if awake is None:
            return ()
        leases = awake.leases
        del awake  # a device counts views
        return tuple(lease.release() for lease in leases)

    def _forget(self, digest: bytes) -> tuple[Released, ...]:
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            found = self._outputs.pop(digest, None)
            return () if found is None else (found.lease.release(),)
        finally:
            self._lock.release()

    def _drop_old(self) -> None:
        """Keep the rows of the last pictures only, as far as they fit; those in use stay."""
        held = sum(one.lease.nbytes for one in self._outputs.values())
        for digest in list(self._outputs)[:-1]:
            if held <= KEPT_BYTES:
                return
            if not self._outputs[digest].lease.in_use:
                held -= self._outputs[digest].lease.nbytes
                self._outputs.pop(digest).lease.release()

    def _read(self, picture: ResizedPicture, cancel: CancelCheck | None) -> _Output:
        plan, shape, dtype = self.plan, self.plan.config.tower, self.dtype
        awake = self._awake = self._awake or self._wake(cancel)
        patches = picture.grid[0] * picture.grid[1]

        def check() -> None:
            if cancel is not None and cancel():
                raise PictureStopped

        with ExitStack() as undo:
            for lease in awake.leases:
                undo.enter_context(lease.using())
            work = self._pool.lease(self._owner, "scratch", TowerScratch.nbytes(shape, patches, dtype), align=ALIGNMENT)
            undo.callback(work.release)
            kept = self._pool.lease(self._owner, "scratch", plan.output_bytes(picture.tokens, dtype), align=ALIGNMENT)
            with ExitStack() as failed:
                failed.callback(kept.release)
                rows = kept.carve((1 + len(shape.taps), picture.tokens, shape.out), dtype)
                with torch.inference_mode():
                    awake.tower.run(picture, TowerScratch(work, shape, patches, dtype), rows, check)
                failed.pop_all()
        self.runs += 1
        kept.offer(lambda: self._forget(picture.digest), policy=self._policy, cold=True)
        return _Output(kept, rows)

    def _wake(self, cancel: CancelCheck | None) -> _Awake:
        """Lease what the tower needs, and read it from its files. Raises MemoryFull, Cancelled, FileError."""
        plan, tower_shape, dtype = self.plan.plan, self.plan.config.tower, self.dtype
        kernels = choose_kernels(self._device, dtype, self._kernel_cache, cancel)
        heads = HeadShape(tower_shape.heads, tower_shape.heads, tower_shape.head_dim)
        buffers = kernels.workspace_spec(heads, 0, dtype, tower_shape.columns)
        with ExitStack() as undo:
            weights = self._pool.lease(self._owner, "weights", plan.nbytes, align=ALIGNMENT)
            undo.callback(weights.release)
            size = max(ALIGNMENT, sum(carved_bytes(shape, kind) for shape, kind in buffers))
            room = self._pool.lease(self._owner, "scratch", size, align=ALIGNMENT)
            undo.callback(room.release)
            kernels.reserve([room.carve(shape, kind) for shape, kind in buffers])
            arrival = WeightArrival(plan, weights, None, cancel, files=self._pool.files).start()
            arrival.finish()
            tower = build(tower_shape, arrival.tensors, kernels)
            undo.pop_all()
        for lease in (weights, room):
            lease.offer(self.give_way, policy=self._policy)
        return _Awake(tower, (weights, room))
