"""Converts ComfyUI's UI format (saved by the page) to its API format (queued), checked against ComfyUI's node
descriptions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

PAGE_ONLY = ("MarkdownNote", "Note")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
CONTROLS = ("fixed", "increment", "decrement", "randomize")
ANY = "*"


class MismatchError(AssertionError):
    """A saved workflow that does not match ComfyUI's nodes."""


def to_api(workflow: Mapping[str, Any], object_info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert a whole workflow; raises MismatchError naming the first node and input that do not match."""
    nodes = {str(entry["id"]): entry for entry in workflow["nodes"] if entry["type"] not in PAGE_ONLY}
    links = {link[0]: link for link in workflow["links"]}
    for link in links.values():
        _check_link(link, nodes, object_info)
    return {key: _node(key, entry, links, object_info) for key, entry in nodes.items()}


def _node(
    key: str, entry: Mapping[str, Any], links: Mapping[int, list[Any]], object_info: Mapping[str, Any]
) -> dict[str, Any]:
    kind = entry["type"]
    if kind not in object_info:
        raise MismatchError(f"node {key}: ComfyUI has no node {kind}")
    specs = _specs(object_info[kind])
    sockets = {slot["name"]: slot["link"] for slot in entry["inputs"]}
    if set(sockets) - set(specs):
        raise MismatchError(f"node {key} ({kind}): unknown inputs {sorted(set(sockets) - set(specs))}")
    inputs = dict(_widget_values(key, entry, specs, object_info[kind]["input"].get("optional", {})))
    for name, link in sockets.items():
        if link is not None:
            inputs[name] = [str(links[link][1]), links[link][2]]
    missing = set(object_info[kind]["input"].get("required", {})) - set(inputs)
    if missing:
        raise MismatchError(f"node {key} ({kind}): nothing is given for {sorted(missing)}")
    return {"class_type": kind, "inputs": inputs}


def _specs(info: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Inputs in ComfyUI's order: (type, options); a list as the type is the older notation for a combo."""
    specs = {}
    for part in ("required", "optional"):
        for name in info["input_order"].get(part, []):
            kind, *options = info["input"][part][name]
            choices = {"options": kind} if isinstance(kind, list) else {}
            specs[name] = ("COMBO" if choices else kind, (options[0] if options else {}) | choices)
    return specs


def _widget_values(
    key: str, entry: Mapping[str, Any], specs: Mapping[str, tuple[str, dict[str, Any]]], optional: Collection[str]
) -> Iterator[tuple[str, Any]]:
    values = iter(entry.get("widgets_values") or [])
    where = f"node {key} ({entry['type']})"
    for name, (kind, options) in specs.items():
        if kind not in WIDGETS or options.get("forceInput"):
            continue
        try:
            value = next(values)
        except StopIteration:
            if name in optional:  # added after the workflow was saved: the page uses the default
                return
            raise MismatchError(f"{where}: no value is saved for {name}") from None
        _check_value(where, name, kind, options, value)
        yield name, value
        if options.get("control_after_generate") and next(values, None) not in CONTROLS:
            raise MismatchError(f"{where}: after {name} there is no control value")
    # Nodes of ComfyUI may have widgets that only the page knows, after all others.
    if entry["type"].startswith("Onedesk") and list(values):
        raise MismatchError(f"{where}: more values are saved than there are widgets")


def _check_value(where: str, name: str, kind: str, options: Mapping[str, Any], value: Any) -> None:
    expected = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool, "COMBO": str}[kind]
    if not isinstance(value, expected) or (kind in ("INT", "FLOAT") and isinstance(value, bool)):
        raise MismatchError(f"{where}: {name} is {value!r}, not {kind}")
    if kind in ("INT", "FLOAT") and not options.get("min", value) <= value <= options.get("max", value):
        raise MismatchError(f"{where}: {name} is {value!r}, outside of its range")
    # Model names are the user's; every other choice must be offered by the node.
    if kind == "COMBO" and not is_model_choice(name) and value not in options["options"]:
        raise MismatchError(f"{where}: {name} is {value!r}, none of {options['options']}")


def is_model_choice(name: str) -> bool:
    """Whether an input selects a file or folder of the user."""
    return name == "model" or (name.endswith("_name") and name not in ("sampler_name",))


def _check_link(link: list[Any], nodes: Mapping[str, Mapping[str, Any]], object_info: Mapping[str, Any]) -> None:
    number, source, output, target, slot, kind = link
    where = f"link {number}"
    if str(source) not in nodes or str(target) not in nodes:
        raise MismatchError(f"{where}: it leads from {source} to {target}, one of which is not there")
    source_info = object_info[nodes[str(source)]["type"]]
    target_slot = nodes[str(target)]["inputs"][slot]
    wanted = _specs(object_info[nodes[str(target)]["type"]])[target_slot["name"]][0]
    given = source_info["output"][output]
    if target_slot["link"] != number or number not in (nodes[str(source)]["outputs"][output]["links"] or []):
        raise MismatchError(f"{where}: its two ends do not name it")
    if kind != given or (ANY not in (given, wanted) and given != wanted):
        raise MismatchError(f"{where}: {kind} from an output of {given} into {target_slot['name']} of {wanted}")
