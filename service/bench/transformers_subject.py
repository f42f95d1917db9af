"""transformers, eager, as the peer: imported only here, in a process of its own, and only when it is installed."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import PeerError
from .samplings import GREEDY
from .subject import DecodeSample, FirstToken, Prefix, SubjectSpec, Wake


class Transformers:
    """See Subject. Weights as stored, eager attention, its own growing cache, greedy by argmax without its
    generation loop.
    """

    def __init__(self, task: SubjectSpec) -> None:
        if find_spec("transformers") is None:
            raise PeerError(
                'transformers is not installed here; pip install "transformers==5.24.0", or leave --against out'
            )
        # A text model needs no torchvision, and one without its compiled operators would stop the import.
        sys.modules["torchvision"] = None  # pyright: ignore[reportArgumentType]
        self._task = task
        self._network: Any = None

    def load(self) -> None:
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        network = AutoModelForCausalLM.from_pretrained(
            self._task.model, dtype="auto", attn_implementation="eager", local_files_only=True, trust_remote_code=False
        )
        self._network = network.eval().to(self._task.device)  # pyright: ignore[reportArgumentType] - its decorator hides the signature

    def unload(self) -> None:
        self._network = None
        gc.collect()

    def first_token(self, ids: Sequence[int], *, overlap: bool) -> FirstToken:
        if overlap:
            raise PeerError("transformers loads everything before it reads a prompt; measure it without overlap")
        started = time.perf_counter()
        self.load()
        prefill = self.prefill(ids)
        return FirstToken(time.perf_counter() - started, prefill, None)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> float:
        started = time.perf_counter()
        self._step(torch.tensor([list(ids)], device=self._task.device), None)
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], tokens: int, sampling: str = GREEDY) -> DecodeSample:
        if sampling != GREEDY:
            raise PeerError("other engines are measured greedy only")
        token, cache = self._step(torch.tensor([list(ids) for ids in prompts], device=self._task.device), None)
        faults, started = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.perf_counter()
        for _ in range(tokens - 1):
            token, cache = self._step(token, cache)
        seconds = time.perf_counter() - started
        return DecodeSample(tokens - 1, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults, None)

    def wake(self, ids: Sequence[int]) -> Wake:
        raise PeerError("only Onedesk gives way and wakes")

    def prefix(self, ids: Sequence[int], tails: Sequence[Sequence[int]]) -> Prefix:
        raise PeerError("only Onedesk has a prefix cache to measure")

    def _step(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """The next tokens [rows, 1] and the cache; reading them waits for the device, as every engine must before it
        shows them.
        """
        answer = self._network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores = answer.logits[:, -1]
        scores[:, list(self._task.end_tokens)] = -torch.inf
        token = scores.argmax(-1, keepdim=True)
        token.tolist()
        return token, answer.past_key_values

    def device_peak(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self._task.device == "cuda" else None
