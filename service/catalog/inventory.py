"""The list of models: one row each, with its requirements and whether it fits; a broken model is a row with the
reason.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..api import pick_context, pick_device
from ..config import FILE_NAME, Config
from ..console import columns, wrapped
from ..core import ModelSpec, Sampling
from ..engine.effective_sampling import checkpoint_sampling, effective_sampling
from ..engine.picture_reader import vision_figures
from ..engine.session import Blueprint, draw_blueprint
from ..errors import FileError, ModelError, OnedeskError
from ..hub.manifest import state_of
from ..loader.checkpoint import CONFIG, GENERATION, Checkpoint, end_ids, open_checkpoint
from ..loader.files import short
from ..loader.names import ModelEntry, ModelRoots
from ..memory.budget import Budget, MemorySettings, Need, make_budget, show
from ..memory.truth import read_truth
from ..model.families import describe
from .composition import compose
from .decode_speed import DecodeSpeed, TokenReads, shown_speed
from .footprint import Here, longest, stored_bytes

TOY_PREFIX = "onedesk-demo-"
TOY_NOTE = "a toy that comes with Onedesk to show the chain"
KV_TOKENS = 1000  # the unit of kv_per_1k
SMALLEST_CONTEXT = 2


def model_roots(config: Config) -> ModelRoots:
    """The model folders of a configuration; symlinks may point into the download cache."""
    return ModelRoots(config.model_roots, targets=[config.cache])


def default_model(config: Config) -> str | None:
    """The model to use when none is named: the configured one, else the only one that is no demo model, else the only
    one.

    A model that cannot be opened, such as half a download, counts only where there is no other. Raises ModelError,
    FileError where the configured one does not exist.
    """
    roots = model_roots(config)
    if config.default_model:
        try:
            roots.find(config.default_model)
        except (ModelError, FileError) as error:
            file = config.file.name if config.file else FILE_NAME
            raise type(error)(f"default in [models] of {file}: {error}") from error
        return config.default_model
    entries = roots.list()
    names = [entry.name for entry in entries]
    whole = [entry.name for entry in entries if _opens(entry, roots)]
    for candidates in ([name for name in whole if not is_toy(name)], whole, names):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _opens(entry: ModelEntry, roots: ModelRoots) -> bool:
    try:
        describe(open_checkpoint(entry.path, roots=roots.bases).config)
    except OnedeskError:
        return False
    return True


def usual_context(config: Config, path: Path, roots: ModelRoots) -> int | None:
    """The configured context, limited to what the model at `path` allows; None where none is configured. Raises
    ModelError, FileError.
    """
    if config.context is None:
        return None
    described = open_checkpoint(path, roots=roots.bases).config
    return min(config.context, describe(described).max_position)


def is_toy(name: str) -> bool:
    """Whether a name belongs to a demo model."""
    return name.rsplit("/", 1)[-1].startswith(TOY_PREFIX)


def model_rows(
    config: Config,
    model: str | None,
    *,
    device: str,
    context: int | None,
    quant: str = "none",
    speed: DecodeSpeed | None = None,
) -> list[dict[str, Any]]:
    """A row for every model of the roots, or for `model` (a name or path) alone; bytes and token counts are integers.

    `format` and `bytes` describe the weights held as `quant`. `fits` is for `context` tokens, or the default context,
    with headroom and no other model; `images` is what is then left for image models, and `context` the longest that
    would fit. A model that cannot be opened (`opens`) has the figures of its files and config.
    `expected_tokens_per_second` is an estimate of `speed`, None without it. Raises ModelError or
    FileError when `model` does not exist.
    """
    roots = model_roots(config)
    values: dict[str, Any] = dict(config.memory)
    settings = MemorySettings(**values)
    truth = read_truth(pick_device(device).type)
    here = Here(truth.available, settings, make_budget(truth, settings))
    entries = roots.list()
    if model is not None:
        path = roots.find(model)
        entries = [entry for entry in entries if entry.path == path] or [
            ModelEntry(path.stem if path.is_file() else path.name, path)
        ]
    asked = ModelSpec("", context or config.context, quant, device)
    rows = [_with_pull(_row(entry, roots, asked, config, here, speed)) for entry in entries]
    links = roots.refused_links() if model is None else []
    return rows + [_blank(link.name, link.path, quant) | {"reason": link.reason} for link in links]


def _with_pull(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its manifest's data, if `onedesk pull` made the folder."""
    path = Path(row["path"])
    try:
        state = state_of(path if path.is_dir() else path.parent)
    except OnedeskError as error:
        return row | {"reason": f"{row['reason']}; {error}"}
    if state is None:
        return row
    repo, text = state.manifest.repo, state.text
    advice = "" if text == "complete" else f"; get the rest: onedesk pull {repo}"
    if state.changed:
        advice = f" since ({short(state.changed[0])}); get it again: onedesk pull {repo}"
    pulled = {"repo": repo, "commit": state.manifest.commit, "source": state.manifest.source, "state": text}
    return row | {"pulled": pulled, "reason": f"{row['reason']}; pulled from {repo}: {text}{advice}"}


def _row(
    entry: ModelEntry, roots: ModelRoots, asked: ModelSpec, config: Config, here: Here, speed: DecodeSpeed | None
) -> dict[str, Any]:
    device = pick_device(asked.device)
    row = _blank(entry.name, entry.path, asked.quant)
    try:
        checkpoint = open_checkpoint(entry.path, roots=roots.bases)
        row |= _from_files(checkpoint)
        row |= _from_config(checkpoint)
        _check_generation(checkpoint)
        sketch = draw_blueprint(checkpoint, device, SMALLEST_CONTEXT, asked.quant, config.cache, draft=config.draft)
    except OnedeskError as error:
        return row | {"reason": str(error)}
    context = _context(asked.context, sketch.config.max_position)
    if (
        sketch.config.draft
        and not _verdict(replace(sketch, context=context).need, context, here.settings, here.budget)[0]
    ):
        sketch = sketch.without_draft()  # as opening does
    need = replace(sketch, context=context).need
    row["format"] = sketch.plan.form
    row["bytes"] |= {
        "weights": need.weights,
        "kv_per_1k": KV_TOKENS * sketch.kv_shape.token_bytes,
        "draft": sketch.draft_bytes,
    }

    def fits_budget(tokens: int) -> bool:
        return replace(sketch, context=tokens).need.with_headroom(here.settings.headroom) <= here.budget.spendable

    row["context"] = longest(fits_budget, sketch.config.max_position)
    row["images"] = here.beside(need.with_headroom(here.settings.headroom))
    fits, reason = _verdict(need, context, here.settings, here.budget)
    reason = "; ".join((reason, *checkpoint.notes))
    if not (checkpoint.folder / "tokenizer.json").is_file():
        reason += "; it has no tokenizer.json, so it takes token ids only (--ids)"
    vision = vision_figures(checkpoint, device)
    reads = TokenReads(sketch.pass_bytes, row["active_parameters"] or 0, sketch.config.layers)
    row["read_per_token"] = reads.nbytes
    row["expected_tokens_per_second"] = speed.tokens_per_second(reads) if speed else None
    return row | {"fits": fits, "reason": reason, "opens": True, "sampling": _sampling(sketch), "vision": vision}


def _sampling(sketch: Blueprint) -> dict[str, dict[str, Any]]:
    """The effective defaults for values that a request leaves out."""
    values = effective_sampling(Sampling(), sketch.checkpoint, sketch.family.default_sampling, "auto")[1]
    return {name: asdict(value) for name, value in values.items()}


def _blank(name: str, path: Path, quant: str) -> dict[str, Any]:
    """A row with only the model's location."""
    unknown = dict.fromkeys(("family", "format", "parameters", "active_parameters"))
    row: dict[str, Any] = {"name": name, "path": str(path), **unknown, "toy": is_toy(name)}
    row |= {
        "quant": quant,
        "bytes": {"weights": None, "table": None, "kv_per_1k": None, "draft": None},
        "fits": False,
        "reason": "",
    }
    row |= {"context": None, "images": None, "opens": False, "sampling": None, "pulled": None}
    row |= {"vision": None, "read_per_token": None, "expected_tokens_per_second": None}
    return row


def _check_generation(checkpoint: Checkpoint) -> None:
    """Raise ModelError for settings that would make every request fail."""
    end_ids(checkpoint.config, CONFIG)
    end_ids(checkpoint.generation, GENERATION)
    checkpoint_sampling(checkpoint.generation)


def _context(wanted: int | None, allowed: int) -> int:
    """The row's context: the requested one, limited to what the model allows."""
    return pick_context(None if wanted is None else min(wanted, allowed), allowed)


def _from_files(checkpoint: Checkpoint) -> dict[str, Any]:
    """The figures from the files alone, also for a family that cannot be opened yet."""
    census = checkpoint.census()
    return {
        "family": str(checkpoint.config["model_type"]).removesuffix("_text"),
        "format": "+".join(census.bytes_by_dtype),
        "parameters": census.parameters,
        "bytes": {**stored_bytes(checkpoint), "kv_per_1k": None, "draft": None},
    }


def _from_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The network's size figures from its config."""
    try:
        network = compose(checkpoint.config)
    except ModelError:
        return {}  # an unknown family; opening lists the supported ones
    return {"parameters": network.parameters, "active_parameters": network.active}


def _verdict(need: Need, context: int, settings: MemorySettings, budget: Budget) -> tuple[bool, str]:
    wanted = need.with_headroom(settings.headroom)
    fits = wanted <= budget.spendable
    figures = f"{show(wanted)} with headroom for {context} tokens, of {show(budget.spendable)} in the budget"
    if fits:
        return True, f"needs {figures}"
    smaller = [
        form
        for form, weights in need.weights_of.items()
        if replace(need, weights=weights).with_headroom(settings.headroom) <= budget.spendable
    ]
    choices = ", ".join(["a smaller context", *(f"--quant {form}" for form in smaller), "or another model"])
    return False, f"does not fit: needs {figures}; choose {choices}"


def model_table(rows: list[dict[str, Any]]) -> str:
    """The rows for a terminal, each followed by its notes."""
    if not rows:
        return (
            "no models; onedesk pull Qwen/Qwen3-4B fetches one, "
            "or put a model folder (config.json, *.safetensors, tokenizer.json) into the models folder"
        )
    lines: list[tuple[str, ...]] = [
        (
            "NAME",
            "FAMILY",
            "FORMAT",
            "PARAMETERS",
            "ACTIVE",
            "WEIGHTS",
            "TABLE",
            "KV / 1000",
            "FITS",
            "CONTEXT",
            "IMAGES",
            "TOKENS/s",
        )
    ]
    for row in rows:
        sizes = [row["bytes"][part] for part in ("weights", "table", "kv_per_1k")]
        counts = [row["parameters"], row["active_parameters"]]
        lines.append(
            (
                row["name"],
                row["family"] or "-",
                row["format"] or "-",
                *("-" if count is None else f"{count / 1e6:,.1f} M" for count in counts),
                *("-" if size is None else show(size) for size in sizes),
                "yes" if row["fits"] else "no",
                "-" if row["context"] is None else f"{row['context']:,}",
                "-" if row["images"] is None else show(row["images"]),
                shown_speed(row["expected_tokens_per_second"]),
            )
        )
    head, *figures = columns(lines).splitlines()
    shown = [head]
    for row, line in zip(rows, figures, strict=True):
        shown += [
            line,
            *wrapped("; ".join(part for part in (TOY_NOTE if row["toy"] else "", row["reason"]) if part), "  "),
        ]
    return "\n".join(shown)
