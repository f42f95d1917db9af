"""The quantizations in which models are published or made, and the file and memory size of each.

Storage formats come from headers and cards of published checkpoints, as far as they were read (Qwen's own FP8; NVFP4 of
RadixArk, NVIDIA and local-inference-lab for Qwen3.8-Flash-Next). Sizes of GGUF files are their publishers' figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from ..loader.header import DTYPE_BITS
from ..quant.formats import INT8, aligned_bytes, int4
from ..quant.microscaled import Mxfp8, Nvfp4
from ..quant.mixed import Packings
from ..quant.packings import Fp8Blocks, Packing, Rows8
from ..quant.published import read_packings
from ..quant.weight import Format
from .composition import Composition, Tensors
from .decode_speed import TokenReads

Engine = Literal["onedesk", "vllm", "llama-server"]
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Store:
    """A storage format of a matrix: bytes of [rows, cols] in a file and in memory, and whether this version
    reads it.
    """

    file: Callable[[int, int], int]
    held: Callable[[int, int], int]
    reads: bool = True


def _of(form: Format, file: Callable[[int, int], int] | None = None) -> Store:
    def held(rows: int, cols: int) -> int:
        return aligned_bytes(form, rows, cols, ALIGNMENT)

    return Store(file or held, held)


def _packed(packing: Packing) -> Store:
    """A format in the layout of a packing that this version reads."""

    def file(rows: int, cols: int) -> int:
        parts = packing.layout(rows, cols).parts
        return sum(math.prod(part.shape) * DTYPE_BITS[part.dtypes[0]] // 8 for part in parts if not part.optional)

    return _of(packing.layout(1, 1).held, file)


def _plain(rows: int, cols: int) -> int:
    return 2 * rows * cols


STORES: Mapping[str, Store] = {
    "bf16": Store(_plain, _plain),
    "fp8": _packed(Fp8Blocks("FP8", "weight_scale_inv")),
    "fp8 scalar": Store(lambda rows, cols: rows * cols, lambda rows, cols: rows * cols),
    "nvfp4": _packed(Nvfp4("NVFP4")),
    "mxfp8": _packed(Mxfp8("MXFP8")),
    "int8": _of(INT8),
    "int4": _of(int4()),
}


@dataclass(frozen=True, slots=True)
class Form:
    """The storage format of each kind of tensor (default BF16), by name of STORES; the draft layer's own under `mtp`.

    `made`: Onedesk makes it from BF16 files while it reads them, or once by `onedesk quantize`; `source`: the other
    form that it is made from. `own`: formats in addition to STORES.
    """

    title: str
    stores: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    mtp: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    made: bool = False
    own: Mapping[str, Store] = field(default_factory=lambda: MappingProxyType({}))
    source: Form | None = None

    def store(self, tensors: Tensors) -> Store:
        """The storage format of these tensors; vectors and convolutions are never quantized."""
        if tensors.part == "vision" or len(tensors.shape) != 2:
            return STORES["bf16"]
        return self._named((self.mtp if tensors.part == "mtp" else self.stores).get(tensors.kind, "bf16"))

    def _named(self, name: str) -> Store:
        return self.own[name] if name in self.own else STORES[name]

    def file_bytes(self, network: Composition) -> int:
        """Bytes of all tensors in the files to download."""
        if self.source is not None:
            return self.source.file_bytes(network)
        if self.made:
            return 2 * network.parameters
        return sum(tensors.count * self.store(tensors).file(*_matrix(tensors.shape)) for tensors in network.tensors)

    def held_bytes(self, network: Composition, nodes: int = 1) -> int:
        """Bytes of the text network in memory without its n-gram table; matrices are divided among the nodes."""
        mine = (tensors for tensors in network.tensors if tensors.part == "text" and tensors.kind != "table")
        return sum(self._held(tensors, nodes) for tensors in mine)

    def token_reads(self, network: Composition) -> TokenReads:
        """What one token reads: all matrices that it is multiplied with, of the experts the chosen ones."""
        mine = [tensors for tensors in network.tensors if tensors.part == "text" and tensors.used]
        nbytes = sum(self._held(replace(tensors, count=tensors.used), 1) for tensors in mine)
        return TokenReads(nbytes, network.active, network.config.layers)

    def draft_bytes(self, network: Composition, nodes: int = 1) -> int:
        """Bytes of the draft layer in memory, where it is opened; per node."""
        return sum(self._held(tensors, nodes) for tensors in network.tensors if tensors.part == "mtp")

    def table_bytes(self, network: Composition, nodes: int = 1) -> int:
        """Bytes of the n-gram table in memory, in its file format; per node."""
        tables = (tensors for tensors in network.tensors if tensors.kind == "table")
        return sum(-(-tensors.count * self.store(tensors).file(*_matrix(tensors.shape)) // nodes) for tensors in tables)

    def _held(self, tensors: Tensors, nodes: int) -> int:
        if len(tensors.shape) == 1:
            return 4 * tensors.elements  # norms are held in fp32
        return -(-tensors.count * self.store(tensors).held(*_matrix(tensors.shape)) // nodes)

    def readable(self) -> bool:
        """Whether this version reads all of its formats."""
        return all(self._named(name).reads for name in (*self.stores.values(), *self.mtp.values()))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor of any shape."""
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class Sized:
    """A form of which only the sizes are known: bytes of its files, and of the n-gram table in them; another engine
    runs it.
    """

    title: str
    file: int
    table: int
    engine: Engine = "llama-server"


def _all(kinds: tuple[str, ...], store: str) -> dict[str, str]:
    return dict.fromkeys(kinds, store)


_EXPERTS = ("experts",)
_PRODUCTS = (
    "attention",
    "linear",
    "dense",
    "experts",
    "shared",
)  # the kinds that a uniform quantization covers
# What --quant makes: these kinds keep at least 8 bits; the router and other small tensors are not quantized.
_NOT_LESS: dict[str, str] = dict.fromkeys(("embedding", "head", "residual", "indexer"), "int8")
_INT8: dict[str, str] = dict.fromkeys((*_PRODUCTS, "ngram"), "int8") | _NOT_LESS
_INT4: dict[str, str] = dict.fromkeys((*_PRODUCTS, "ngram"), "int4") | _NOT_LESS
_MXFP8_LAYERS = ("attention", "linear", "shared", "indexer")

_FP8 = Form("FP8 experts and table", {"experts": "fp8", "table": "fp8 scalar"}, _all(_EXPERTS, "fp8"))
WITH_TABLE = (
    Form("BF16"),
    _FP8,
    Form("NVFP4 experts, BF16 table", _all(_EXPERTS, "nvfp4")),
    Form("NVFP4 experts, FP8 table", {"experts": "nvfp4", "table": "fp8 scalar"}),
    Form("NVFP4 experts, FP8 table and draft", {"experts": "nvfp4", "table": "fp8 scalar"}, _all(_EXPERTS, "fp8")),
    Form("NVFP4 experts, 4-bit table", {"experts": "nvfp4", "table": "nvfp4"}, _all(_EXPERTS, "nvfp4")),
    Form(
        "NVFP4 experts, MXFP8 layers, 4-bit table",
        _all(_MXFP8_LAYERS, "mxfp8") | {"experts": "nvfp4", "table": "nvfp4"},
        _all(_EXPERTS, "nvfp4"),
    ),
    Form("INT8, made on load", _INT8, _INT8, made=True),
    Form("INT4, made on load", _INT4, _INT4, made=True),
    Form("INT4, made once of the FP8 files", _INT4 | {"table": "fp8 scalar"}, _INT4, made=True, source=_FP8),
)
WITHOUT_TABLE = (
    Form("BF16"),
    Form("FP8", _all(_PRODUCTS, "fp8"), _all(_PRODUCTS, "fp8")),
    Form("NVFP4", _all(_PRODUCTS, "nvfp4")),
    Form("INT8, made on load", _INT8, _INT8, made=True),
    Form("INT4, made on load", _INT4, _INT4, made=True),
)
_GB = 10**9
_GGUF_TABLE = 28_800 * 10**6  # IQ4_NL, 4.5 bits per number
SIZED: Mapping[str, tuple[Sized, ...]] = {
    "Qwen3.8-Flash-Next": (
        Sized("MXFP4 and FP8 experts, FP8 table", 146_600 * 10**6, 51_200 * 10**6, "vllm"),
        Sized("GGUF 1-bit", 75 * _GB, _GGUF_TABLE),
        Sized("GGUF UD-IQ4_XS", 93_700 * 10**6, _GGUF_TABLE),
        Sized("GGUF UD-Q4_K_XL", 111 * _GB, _GGUF_TABLE),
        Sized("GGUF UD-Q6_K_XL", 169_200 * 10**6, 54_400 * 10**6),
        *(
            Sized(f"GGUF {name}", mega * 10**6 + _GGUF_TABLE, _GGUF_TABLE)
            for name, mega in (("Q2_0", 37_600), ("IQ3_S", 54_800))
        ),
    )
}


def forms_of(network: Composition) -> tuple[Form, ...]:
    """Every form of a family whose size can be computed."""
    return WITH_TABLE if any(tensors.kind == "table" for tensors in network.tensors) else WITHOUT_TABLE


# A module of each kind, by its plain name; {} is the layer.
_MODULES: Mapping[str, str] = {
    "attention": "layers.{}.self_attn.q_proj",
    "indexer": "layers.{}.self_attn.indexer.index_qk_proj",
    "linear": "layers.{}.linear_attn.in_proj_qkv",
    "dense": "layers.{}.mlp.gate_proj",
    "experts": "layers.{}.mlp.experts.0.gate_proj",
    "shared": "layers.{}.mlp.shared_expert.gate_proj",
    "table": "layers.{}.ple.ple_embedding.ngram_embedding",
    "head": "lm_head",
}


def form_of_config(config: Mapping[str, Any], layers: int) -> Form:
    """The form that a folder's quantization_config declares, for a network with this many layers. Raises ModelError for
    an unsupported one.
    """
    packings = read_packings(config)
    if packings is None:
        return Form("BF16")
    own: dict[str, Store] = {}
    stores, mtp = (_said(packings, prefix, count, own) for prefix, count in (("", layers), ("mtp.", 1)))
    return Form(packings.titles, stores, mtp, own=own)


def _said(packings: Packings, prefix: str, layers: int, own: dict[str, Store]) -> dict[str, str]:
    """The storage format of most layers, per kind; its description goes into `own`."""
    found: dict[str, str] = {}
    for kind, module in _MODULES.items():
        each = Counter(packings.said(prefix + module.format(layer)) for layer in range(layers))
        packing = next((packing for packing, _ in each.most_common() if packing is not None), None)
        if packing is not None and (kind in _PRODUCTS or packing is not packings.usual):
            found[kind] = f"{kind} in {packing.title}"
            own[found[kind]] = _table_store(packing) if kind == "table" else _packed(packing)
    return found


def _table_store(packing: Packing) -> Store:
    """The format of table rows that are read in place: FP8 with one scale, NVFP4, or an unsupported one."""
    return (
        STORES["fp8 scalar"]
        if isinstance(packing, Rows8)
        else replace(_packed(packing), reads=isinstance(packing, Nvfp4))
    )
