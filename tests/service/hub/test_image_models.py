"""Image models by name: the data file, and their files in ComfyUI's folders with the language model's weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import Repository, sha256, tensor_file, tiny_repository
from onedesk.service.errors import FileError, ModelError, RequestError
from onedesk.service.hub.image_models import DATA, find_image_model, read_image_models
from onedesk.service.hub.manifest import state_of
from pulling import Desk

FILES = {
    "split/diffusion_models/painter.safetensors": tensor_file("painter", 1, 64_000),
    "split/diffusion_models/painter_fp8.safetensors": tensor_file("painter", 2, 32_000),
    "split/text_encoders/qwen.safetensors": tensor_file("qwen", 3, 64_000),
    "split/vae/ae.safetensors": tensor_file("ae", 4, 16_000),
}


def entry(name: str, path: str, folder: str) -> str:
    content = FILES[path]
    return (
        f'[files.{name}]\nrepo = "parts/painter"\ncommit = "{"a" * 40}"\npath = "{path}"\nfolder = "{folder}"\n'
        f'size = {len(content)}\nsha256 = "{sha256(content)}"\n'
    )


@pytest.fixture
def painter(desk: Desk) -> Desk:
    """A desk whose data file knows one image model, whose commit the hub no longer has."""
    text = "".join(entry(Path(path).stem, path, path.split("/")[1]) for path in FILES)
    text += '[models.painter-turbo]\nnames = ["painter"]\nlicense = "apache-2.0"\n'
    text += 'forms.bf16 = ["painter", "qwen", "ae"]\nforms.fp8 = ["painter_fp8", "qwen", "ae"]\n'
    text += 'language_model = "tiny/model"\nlanguage_weights = "qwen"\nunverified = ["the weights"]\n'
    desk.data = desk.tree / "data.toml"
    desk.data.write_text(text)
    desk.hub.repositories["parts/painter"] = Repository(dict(FILES), commit="b" * 40)
    return desk


def test_the_shipped_data_file_is_whole():
    models = read_image_models(DATA)
    assert set(models) == {"z-image-turbo", "flux2-klein-4b", "qwen-image"}
    for model in models.values():
        for files in model.forms.values():
            assert {file.folder for file in files} == {"diffusion_models", "text_encoders", "vae"}
            assert len({file.target for file in files}) == len(files)
    assert find_image_model("Z-Image", models) is models["z-image-turbo"]
    assert find_image_model("klein-4b", models) is models["flux2-klein-4b"]
    assert find_image_model("Qwen/Qwen3-4B", models) is None
    # One text encoder for both, so that it is fetched once.
    assert models["z-image-turbo"].language_weights == models["flux2-klein-4b"].language_weights


def test_every_file_goes_into_its_folder_of_comfyui(painter: Desk):
    done = painter.pull("painter")
    comfyui = painter.models / "comfyui"
    for path in (
        "split/diffusion_models/painter.safetensors",
        "split/text_encoders/qwen.safetensors",
        "split/vae/ae.safetensors",
    ):
        assert (comfyui / path.removeprefix("split/")).read_bytes() == FILES[path]
    assert not (comfyui / "diffusion_models" / "painter_fp8.safetensors").exists()
    assert done["folder"] == str(comfyui)
    state = state_of(comfyui, ".onedesk/painter-turbo.json")
    assert state is not None
    assert state.text == "complete"


def test_the_language_model_shares_the_text_encoders_weights(painter: Desk):
    painter.pull("painter")
    writer = painter.models / "model"
    assert (writer / "config.json").read_bytes() == tiny_repository().files["config.json"]
    assert (writer / "model.safetensors").is_symlink()
    assert (writer / "model.safetensors").resolve() == painter.models / "comfyui" / "text_encoders" / "qwen.safetensors"
    assert not list(writer.glob("model-0*"))
    state = state_of(writer)
    assert state is not None
    assert state.text == "complete"
    painter.hub.asked.clear()
    assert painter.pull("painter")["fetched"] == 0


def test_a_second_form_fetches_only_what_is_new(painter: Desk):
    painter.pull("painter")
    done = painter.pull("painter", form="fp8")
    assert done["fetched"] == len(FILES["split/diffusion_models/painter_fp8.safetensors"])
    with pytest.raises(RequestError, match="no form 'int3'; there are bf16, fp8"):
        painter.pull("painter", form="int3")


def test_a_language_model_with_its_own_weights_is_left_alone(painter: Desk):
    painter.pull()
    painter.pull("painter")
    assert not (painter.models / "model" / "model.safetensors").exists()
    assert painter.same_files()


def test_other_bytes_than_the_data_file_knows_are_refused(painter: Desk):
    files = painter.hub.repositories["parts/painter"].files
    files["split/vae/ae.safetensors"] = tensor_file("ae", 99, 16_000)
    with pytest.raises(ModelError, match=r"no 'split/vae/ae\.safetensors' with the .* bytes and the SHA-256"):
        painter.pull("painter")
    assert not (painter.models / "comfyui" / "vae").exists()


def test_a_link_to_a_file_elsewhere_with_the_right_bytes_counts(painter: Desk, tmp_path: Path):
    (tmp_path / "elsewhere.safetensors").write_bytes(FILES["split/vae/ae.safetensors"])
    (painter.models / "comfyui" / "vae").mkdir(parents=True)
    (painter.models / "comfyui" / "vae" / "ae.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    painter.pull("painter")
    assert (painter.models / "comfyui" / "vae" / "ae.safetensors").is_symlink()


def test_the_plan_counts_image_files_and_shows_what_was_not_verified(painter: Desk):
    plan = painter.plan("painter")
    images = len(FILES["split/diffusion_models/painter.safetensors"]) + len(FILES["split/vae/ae.safetensors"])
    assert plan.fit.text == f"model fits beside {images} bytes"
    assert plan.warnings == ("the weights",)
    document = plan.document()
    assert document["missing"] == document["bytes"] == sum(file["size"] for file in document["files"])
    assert document["license"] == "apache-2.0"


@pytest.mark.parametrize("option", [{"globs": ("*",)}, {"revision": "main"}, {"folder_name": "other"}])
def test_options_that_do_not_go_with_a_fixed_set_are_refused(painter: Desk, option: dict[str, object]):
    with pytest.raises(RequestError, match="fixed set of files"):
        painter.pull("painter", **option)


@pytest.mark.parametrize(
    "change",
    [
        ("size = ", "size = -"),
        ("sha256 = ", "sha255 = "),
        ('folder = "vae"', 'folder = "../vae"'),
        ('path = "split/vae/ae.safetensors"', 'path = "../ae.safetensors"'),
        ("[models.painter-turbo]", "[models.painter-turbo]\nwrong = 1"),
    ],
)
def test_a_data_file_that_is_wrong_is_named(painter: Desk, change: tuple[str, str]):
    assert painter.data is not None
    painter.data.write_text(painter.data.read_text().replace(*change))
    with pytest.raises(FileError, match=r"data\.toml"):
        painter.pull("painter")
