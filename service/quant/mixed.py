"""Which packing each matrix of a checkpoint has, if they differ."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import ModelError
from .packings import Packing

# Prefixes of module names. Those of a config and of its tensors may differ.
_PREFIXES = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")


def plain_name(module: str) -> str:
    """The name of a module without the prefix of the text network: layers.0.mlp.gate_proj, lm_head."""
    return _PREFIXES.sub("", module)


def _matches(pattern: re.Pattern[str], plain: str) -> bool:
    """Whether a pattern matches a module, with any of the prefixes."""
    return any(pattern.fullmatch(before + plain) for before in ("", "model.", "model.language_model."))


def glob(text: str) -> re.Pattern[str]:
    """A pattern with * and ? as one over whole names. Matching takes time linear in the name."""
    return re.compile(fnmatch.translate(text))


@dataclass(frozen=True, slots=True)
class Packings:
    """The packings of a checkpoint.

    `named`: by plain module names, each for everything in the module. `patterned`: by patterns of whole names, of which
    the first match counts. `usual`: for all others, None if they are stored as floats. `left_out`: patterns of modules
    that the config says are floats. `beside`: suffixes of tensors that may accompany floats and are not needed.
    """

    usual: Packing | None
    named: Mapping[str, Packing | None] = field(default_factory=lambda: MappingProxyType({}))
    patterned: tuple[tuple[re.Pattern[str], Packing], ...] = ()
    left_out: tuple[re.Pattern[str], ...] = ()
    beside: tuple[str, ...] = ()

    def said(self, module: str) -> Packing | None:
        """The packing of one matrix by the config alone. The files may still hold floats."""
        return None if any(_matches(pattern, plain_name(module)) for pattern in self.left_out) else self.of(module)

    def of(self, module: str) -> Packing | None:
        """The packing of one packed matrix, by the name of its module."""
        whole = plain_name(module)
        name = whole
        while name:
            if name in self.named:
                return self.named[name]
            name = name.rpartition(".")[0]
        return next((packing for pattern, packing in self.patterned if _matches(pattern, whole)), self.usual)

    def of_all(self, modules: Iterable[str]) -> Packing | None:
        """The common packing of matrices that are stored as one. Raises ModelError if they differ."""
        found = {module: self.of(module) for module in modules}
        first, packing = next(iter(found.items()))
        for module, other in found.items():
            if other != packing:
                told = ", ".join(
                    f"{name} {of.title if of else 'floats'}" for name, of in ((first, packing), (module, other))
                )
                raise ModelError(
                    f"config.json has different formats for tensors that are stored as one ({told}); "
                    "get a checkpoint with one format for them"
                )
        return packing

    @property
    def titles(self) -> str:
        """All packings, for messages."""
        each = [self.usual, *self.named.values(), *(packing for _, packing in self.patterned)]
        return ", ".join(dict.fromkeys(packing.title for packing in each if packing))
