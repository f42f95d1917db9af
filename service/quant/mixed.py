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

# Regular expressions that are fast on any name: letters, points, digits and classes of them, alternatives without
# repetition, and a few repetitions of single characters.
_PART = r"[\w\-]|\\\.|\.\*|\.|\\d\+?|\[[\w\-]+\]\+?"
_GROUP = r"\((?:\?:)?(?:[\w\-|.]|\\\.)+\)"
_SAFE = re.compile(rf"(?:{_PART}|{_GROUP})+")
_REPETITIONS, _LONGEST = 6, 300


def safe_pattern(text: str) -> re.Pattern[str] | None:
    """An expression that matches from the start of a name, as one over whole names. None if it may take forever."""
    inner = text.removeprefix("^").removesuffix("$")
    if not _SAFE.fullmatch(inner) or inner.count("*") + inner.count("+") > _REPETITIONS or len(inner) > _LONGEST:
        return None
    return re.compile(inner + ("" if text.endswith("$") else ".*"))


def plain_name(module: str) -> str:
    """The name of a module without the prefix of the text network: layers.0.mlp.gate_proj, lm_head."""
    return _PREFIXES.sub("", module)


def _matches(pattern: re.Pattern[str], plain: str) -> bool:
    """Whether a pattern matches a module, with any of the prefixes."""
    return any(pattern.fullmatch(before + plain) for before in ("", "model.", "model.language_model."))


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules that a list of a config names.

    They have a plain name of `names`, end with one of `endings`, or match `pattern`. A config may list thousands of
    names, so names are looked up, and all patterns are joined into one.
    """

    names: frozenset[str] = frozenset()
    endings: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, *, names: Iterable[str] = (), endings: Iterable[str] = (), patterns: Iterable[str] = ()) -> Modules:
        """`patterns` are regular expressions over whole names."""
        joined = "|".join(f"(?:{pattern})" for pattern in patterns)
        return cls(frozenset(names), frozenset(endings), re.compile(joined) if joined else None)

    def __contains__(self, plain: str) -> bool:
        parts = plain.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = plain in self.names or any(end in self.endings for end in ends)
        return found or (self.pattern is not None and _matches(self.pattern, plain))


def globs(texts: Iterable[str]) -> Modules:
    """Names, some with * and ?, as a list of modules. Matching takes time linear in the name."""
    texts = list(texts)
    wild = [text for text in texts if any(sign in text for sign in "*?[")]
    return Modules.of(names=map(plain_name, texts), patterns=map(fnmatch.translate, wild))


@dataclass(frozen=True, slots=True)
class Packings:
    """The packings of a checkpoint.

    `named`: by plain module names, each for everything in the module. `patterned`: by patterns of whole names, of which
    the first match counts. `usual`: for all others, None if they are stored as floats. `left_out`: modules that the
    config says are floats. `extras`: suffixes of tensors that may accompany floats and are not needed.
    """

    usual: Packing | None
    named: Mapping[str, Packing | None] = field(default_factory=lambda: MappingProxyType({}))
    patterned: tuple[tuple[re.Pattern[str], Packing | None], ...] = ()
    left_out: Modules = field(default_factory=Modules)
    extras: tuple[str, ...] = ()

    def said(self, module: str) -> Packing | None:
        """The packing of one matrix by the config alone. The files may still hold floats."""
        return None if plain_name(module) in self.left_out else self.of(module)

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
                listed = ", ".join(
                    f"{name} {of.title if of else 'floats'}" for name, of in ((first, packing), (module, other))
                )
                raise ModelError(
                    f"config.json has different formats for tensors that are stored as one ({listed}); "
                    "get a checkpoint with one format for them"
                )
        return packing

    @property
    def titles(self) -> str:
        """All packings, for messages."""
        each = [self.usual, *self.named.values(), *(packing for _, packing in self.patterned)]
        return ", ".join(dict.fromkeys(packing.title for packing in each if packing))
