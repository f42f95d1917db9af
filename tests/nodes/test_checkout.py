"""A checkout that somebody cloned into custom_nodes, in the real ComfyUI: without install.sh, a tree or an
environment of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui import BoundComfy, Comfy
from kept_kernels import keep_kernels
from node_graphs import shown, writing
from tiny_models import write_language_model

# The same pack once more, as if it had been installed twice.
SECOND = "my second desk"
# Inputs of the first release. A workflow in API form that has these alone must go on working, so every later one is
# optional.
FIRST_INPUTS = {
    "OnedeskLoadModel": {"model", "weights", "context", "policy"},
    "OnedeskPrompt": {"preset", "system", "text", "dynamic", "seed"},
    "OnedeskGenerate": {"model", "messages", "seed", "max_tokens"},
    "OnedeskTextEncoder": {"model", "text", "layers", "template", "min_tokens"},
    "OnedeskSampling": {
        *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "thinking", "thinking_budget", "stop_repetition", "logit_bias"),
    },
    "OnedeskRelease": {"value"},
}
PARTS = ("__init__.py", "pyproject.toml", "models", "nodes", "service", "workflows")


def files(folder: Path) -> set[str]:
    """All of a folder that is no cache."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != ".cache" and "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def pack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ComfyUI uses of a clone, under another name than ours, and settings in its folder."""
    base = tmp_path_factory.mktemp("cloned")
    pack = base / "custom_nodes" / "ComfyUI-Onedesk"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS]
    listed = subprocess.run(words, cwd=repository, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (repository / name).is_file():
            (pack / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, pack / name)
    (pack / "onedesk.toml").write_text(
        '[models]\nroots = ["../../more"]\n[peers.far]\nkind = "openai"\nurl = "http://127.0.0.1:9/v1"\n'
    )
    keep_kernels(pack / ".cache")
    write_language_model(base / "more" / "elsewhere")
    write_language_model(base / "models" / "llm" / "in-comfyui")
    (base / "custom_nodes" / SECOND).symlink_to(pack)
    return pack


@pytest.fixture(scope="module")
def cloned(comfyui_folder: Path, pack: Path) -> Iterator[Comfy]:
    base = pack.parents[1]
    words = (
        "--database-url sqlite:///:memory: --disable-auto-launch --disable-api-nodes --disable-all-custom-nodes --cpu"
    )
    arguments = ["--base-directory", str(base), *words.split(), "--whitelist-custom-nodes", pack.name, SECOND]
    process = BoundComfy(Path(sys.executable), comfyui_folder, arguments, log=base / "comfyui.log", environment={})
    process.start()
    yield Comfy(process, base)
    process.stop()


def test_it_offers_models_of_all_three_sources(cloned: Comfy) -> None:
    inputs = cloned.object_info("OnedeskLoadModel")["input"]
    assert set(inputs["required"]["model"][1]["options"]) == {"in-comfyui", "elsewhere", "onedesk-demo-writer"}
    assert inputs["optional"]["where"][1]["options"] == ["in this process", "local service", "other server: far"]


def test_only_its_cache_is_left_in_the_checkout(cloned: Comfy, pack: Path) -> None:
    before = files(pack)
    outcome = cloned.run(writing(model="elsewhere"))
    assert len(shown(outcome, "text")) >= 12
    assert files(pack) == before


def test_a_duplicate_pack_is_registered_once(cloned: Comfy) -> None:
    scripts = [name for name in cloned.client.ask("/extensions") if name.endswith("/onedesk.js")]
    assert len(scripts) == 1, scripts
    log = cloned.process.log.read_text()
    assert log.count("Onedesk is in custom_nodes twice") == 1
    for node in FIRST_INPUTS:
        assert cloned.object_info(node)["python_module"] in ("custom_nodes.ComfyUI-Onedesk", f"custom_nodes.{SECOND}")


@pytest.mark.parametrize("node", FIRST_INPUTS)
def test_inputs_that_came_later_are_optional(cloned: Comfy, node: str) -> None:
    assert set(cloned.object_info(node)["input"].get("required", {})) <= FIRST_INPUTS[node]
