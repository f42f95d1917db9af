"""llama.cpp as the peer, through llama-cpp-python's plain bindings: imported only here, in a process of its own,
when it is installed.
"""

from __future__ import annotations

import ctypes
import json
import resource
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import PeerError
from .random_gguf import random_gguf
from .samplings import GREEDY
from .subject import DecodeSample, FirstToken, Prefix, SubjectSpec, Wake

BATCH = 512


class LlamaCpp:
    """See Subject. Random weights of the model's shape in the format nearest to our quantization; as many threads as
    we use; greedy.
    """

    def __init__(self, task: SubjectSpec) -> None:
        if find_spec("llama_cpp") is None:
            raise PeerError(
                'llama.cpp is not installed here; pip install "llama-cpp-python>=0.3.36", or leave --against out'
            )
        if task.device != "cpu":
            raise PeerError(f"llama.cpp is measured on the CPU only, not on {task.device}; leave --against out")
        config = json.loads((task.model / "config.json").read_text(encoding="utf-8"))
        self._task = task
        self._file = random_gguf(config, task.model.name, task.quant, task.cache)
        self._vocab = int(config["vocab_size"])
        # llama.cpp's own threads do the work: idle torch threads would spin on the same cores.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._native: Any = None
        self._model: Any = None
        self._context: Any = None
        self._batch: Any = None

    def load(self) -> None:
        from llama_cpp import llama_cpp as native  # pyright: ignore[reportMissingImports]

        self._native = native
        native.llama_backend_init()
        wanted = native.llama_model_default_params()
        wanted.n_gpu_layers = 0
        self._model = native.llama_model_load_from_file(str(self._file).encode(), wanted)
        if not self._model:
            raise PeerError(f"llama.cpp could not load {self._file.name}; delete it, so that it is written again")
        asked = native.llama_context_default_params()
        asked.n_ctx = self._task.context * self._task.sequences
        asked.n_batch = asked.n_ubatch = BATCH
        asked.n_seq_max = self._task.sequences
        asked.n_threads = asked.n_threads_batch = self._threads
        self._context = native.llama_init_from_model(self._model, asked)
        if not self._context:
            raise PeerError(f"llama.cpp could not make a context of {asked.n_ctx} tokens; ask for fewer")
        self._batch = native.llama_batch_init(BATCH, 0, 1)

    def unload(self) -> None:
        if self._context:
            self._native.llama_batch_free(self._batch)
            self._native.llama_free(self._context)
            self._native.llama_model_free(self._model)
        self._model = self._context = self._batch = None

    def first_token(self, ids: Sequence[int], *, overlap: bool) -> FirstToken:
        if overlap:
            raise PeerError("llama.cpp loads everything before it reads a prompt; measure it without overlap")
        started = time.perf_counter()
        self.load()
        prefill = self.prefill(ids)
        return FirstToken(time.perf_counter() - started, prefill, None)

    def prefill(self, ids: Sequence[int]) -> float:
        self._forget()
        started = time.perf_counter()
        self._read(0, ids)
        return time.perf_counter() - started

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: str = GREEDY) -> DecodeSample:
        if sampling != GREEDY:
            raise PeerError("other engines are measured greedy only")
        self._forget()
        written = [self._read(row, ids) for row, ids in enumerate(prompts)]
        faults, started = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.perf_counter()
        for step in range(tokens - 1):
            written = self._run([(token, len(prompts[row]) + step, row, True) for row, token in enumerate(written)])
        seconds = time.perf_counter() - started
        return DecodeSample(tokens - 1, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults, None)

    def wake(self, ids: Sequence[int]) -> Wake:
        raise PeerError("only Onedesk gives way and wakes")

    def prefix(self, ids: Sequence[int], tails: Sequence[Sequence[int]]) -> Prefix:
        raise PeerError("only Onedesk has a prefix cache to measure")

    def device_peak(self) -> int | None:
        return None

    def _forget(self) -> None:
        self._native.llama_memory_clear(self._native.llama_get_memory(self._context), True)

    def _read(self, row: int, ids: Sequence[int]) -> int:
        """Prefill one sequence, BATCH tokens at a time; returns the token after it."""
        token = -1
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            last = at + len(part) == len(ids)
            found = self._run([(value, at + i, row, last and i == len(part) - 1) for i, value in enumerate(part)])
            token = found[0] if found else -1
        return token

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, row, scores wanted); the most likely token after each row whose scores are
        wanted.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, row, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        status = self._native.llama_decode(self._context, batch)
        if status:
            raise PeerError(f"llama.cpp refused a pass of {len(rows)} tokens, status {status}; ask for fewer")
        return [self._likeliest(i) for i, (*_, wanted) in enumerate(rows) if wanted]

    def _likeliest(self, index: int) -> int:
        address = ctypes.cast(
            self._native.llama_get_logits_ith(self._context, index), ctypes.POINTER(ctypes.c_float * self._vocab)
        )
        scores = torch.frombuffer(address.contents, dtype=torch.float32)
        scores[list(self._task.end_tokens)] = -torch.inf
        return int(scores.argmax())
