"""Nodes for the tests alone, loaded by the real ComfyUI: a text encoder that is small enough to be made at random."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.sd
import comfy.text_encoders.z_image
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io

from . import machine
from .probe import TestFailure, TestList, TestMemory, TestRandomStates, TestRoom

# The same sizes as ENCODER in tests/tiny_models.py.
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class TestTextEncoder(io.ComfyNode):
    """What CLIPLoader does, for a width that CLIPLoader takes for another model's."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        choices = io.Combo.Input("clip_name", options=folder_paths.get_filename_list("text_encoders"))
        return io.Schema(node_id="TestTextEncoder", category="test", inputs=[choices], outputs=[io.Clip.Output()])

    @classmethod
    def execute(cls, clip_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("text_encoders", clip_name)
        weights = comfy.utils.load_torch_file(path, safe_load=True)
        family = comfy.text_encoders.z_image
        target = SimpleNamespace(params={}, clip=family.te(dtype_llama=torch.float32), tokenizer=family.ZImageTokenizer)
        encoder = comfy.sd.CLIP(
            target,
            embedding_directory=None,
            tokenizer_data={},
            parameters=comfy.utils.calculate_parameters(weights),
            state_dict=[weights],
            model_options={"qwen3_4b_model_config": SIZES},
        )
        return io.NodeOutput(encoder)


class TestPack(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TestTextEncoder, TestList, TestMemory, TestRandomStates, TestFailure, TestRoom, *machine.NODES]


async def comfy_entrypoint() -> ComfyExtension:
    return TestPack()
