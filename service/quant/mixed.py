"""Which matrix of a checkpoint is in which packing, where they are not all alike."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import ModelError
from .packings import Packing

# What stands before a module's own name; a config and its tensors need not have the same.
_PREFIXES = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")

# Regular expressions of names that take no long time on any name: letters, points, digits and classes of them, alternatives without
# repetition, and a few repetitions of single characters.
_PART = r"[\w\-]|\\\.|\.\*|\.|\\d\+?|\[[\w\-]+\]\+?"
_GROUP = r"\((?:\?:)?(?:[\w\-|.]|\\\.)+\)"
_SAFE = re.compile(rf"(?:{_PART}|{_GROUP})+")
_REPETITIONS, _LONGEST = 6, 300


def safe_pattern(text: str) -> re.Pattern[str] | None:
    """An expression that matches from the beginning of a name, as one of whole names; None for one that may take for ever."""
    inner = text.removeprefix("^").removesuffix("$")
    if not _SAFE.fullmatch(inner) or inner.count("*") + inner.count("+") > _REPETITIONS or len(inner) > _LONGEST:
        return None
    return re.compile(inner + ("" if text.endswith("$") else ".*"))


def plain_name(module: str) -> str:
    """A module's name without what stands before the text network: layers.0.mlp.gate_proj, lm_head."""
    return _PREFIXES.sub("", module)


def _matches(pattern: re.Pattern[str], plain: str) -> bool:
    """Whether a pattern is for a module, whatever a checkpoint has before its plain name."""
    return any(pattern.fullmatch(before + plain) for before in ("", "model.", "model.language_model."))


@dataclass(frozen=True, slots=True)
class Modules:
    """Which modules a list of a config means: those with a plain name of `names`, those whose name ends with one of `endings`, and those
    that `pattern` matches. A config may list thousands of names, so that they are looked up, and patterns are one.
    """

    names: frozenset[str] = frozenset()
    endings: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, *, names: Iterable[str] = (), endings: Iterable[str] = (), patterns: Iterable[str] = ()) -> Modules:
        """`patterns` are regular expressions of whole names."""
        joined = "|".join(f"(?:{pattern})" for pattern in patterns)
        return cls(frozenset(names), frozenset(endings), re.compile(joined) if joined else None)

    def __contains__(self, plain: str) -> bool:
        parts = plain.split(".")
        ends = (".".join(parts[first:]) for first in range(len(parts)))
        found = plain in self.names or any(end in self.endings for end in ends)
        return found or (self.pattern is not None and _matches(self.pattern, plain))


def globs(texts: Iterable[str]) -> Modules:
    """Names, some with * and ?, as a list of modules; the translation takes time in the length of a name alone."""
    texts = list(texts)
    wild = [text for text in texts if any(sign in text for sign in "*?[")]
    return Modules.of(names=map(plain_name, texts), patterns=map(fnmatch.translate, wild))


@dataclass(frozen=True, slots=True)
class Packings:
    """The packings of a checkpoint: `named` by plain module names, each for all that is in it, `patterned` by patterns of whole names
    (the first that matches), `usual` for all others. None: stored in floats. `left_out`: what is said to be in floats,
    `beside`: suffixes of tensors that may lie next to floats and are not needed.
    """

    usual: Packing | None
    named: Mapping[str, Packing | None] = field(default_factory=lambda: MappingProxyType({}))
    patterned: tuple[tuple[re.Pattern[str], Packing | None], ...] = ()
    left_out: Modules = field(default_factory=Modules)
    beside: tuple[str, ...] = ()

    def said(self, module: str) -> Packing | None:
        """The packing of one matrix by the config alone. What lies in the files may be in floats all the same."""
        return None if plain_name(module) in self.left_out else self.of(module)

    def of(self, module: str) -> Packing | None:
        """The packing of one matrix where it is packed, by the name of its module."""
        whole = plain_name(module)
        name = whole
        while name:
            if name in self.named:
                return self.named[name]
            name = name.rpartition(".")[0]
        return next((packing for pattern, packing in self.patterned if _matches(pattern, whole)), self.usual)

    def of_all(self, modules: Iterable[str]) -> Packing | None:
        """The packing of matrices that are held as one. ModelError where they have not one together."""
        found = {module: self.of(module) for module in modules}
        first, packing = next(iter(found.items()))
        for module, other in found.items():
            if other != packing:
                told = ", ".join(f"{name} {of.title if of else 'floats'}" for name, of in ((first, packing), (module, other)))
                raise ModelError(
                    f"config.json has other formats for tensors that belong together ({told}); get a checkpoint with one for them"
                )
        return packing

    @property
    def titles(self) -> str:
        """All of them, for messages."""
        each = [self.usual, *self.named.values(), *(packing for _, packing in self.patterned)]
        return ", ".join(dict.fromkeys(packing.title for packing in each if packing))
