"""The installer's pip, for real: no variable and no file of the user leads it out of our environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onedesk.service.setup.environment import Environment
from onedesk.service.setup.pip_settings import PASSED, pip_environment
from onedesk.service.setup.steps import Steps
from onedesk.service.setup.tree import Tree


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of one module, made by hand: nothing has to be built."""
    import zipfile

    wheel = tmp_path_factory.mktemp("shelf") / "onedesk_probe-1-py3-none-any.whl"
    info = "onedesk_probe-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("onedesk_probe.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: onedesk-probe\nVersion: 1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Ours and another one, with pip."""
    folder = tmp_path_factory.mktemp("environments")
    for name in ("ours", "theirs"):
        subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    return folder / "ours", folder / "theirs"


LEADS_ELSEWHERE = (
    "python",
    "target",
    "prefix",
    "root",
    "user",
    "dry_run",
    "no_deps",
    "report",
    "platform",
    "break_system_packages",
)


@pytest.mark.parametrize("way", ["variable", "user file", "named file", "XDG file"])
def test_nothing_of_the_users_pip_leads_out_of_our_environment(
    way: str, source: Path, environments: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = environments
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.chdir(home)
    settings = {
        "python": str(theirs / "bin" / "python"),
        "target": str(elsewhere),
        "dry-run": "1",
        "user": "1",
        "root": str(elsewhere),
    }
    text = "[global]\npython = {python}\n[install]\ntarget = {target}\ndry-run = 1\nroot = {root}\n".format(**settings)
    if way == "variable":
        for name, value in settings.items():
            monkeypatch.setenv("PIP_" + name.upper().replace("-", "_"), value)
    else:
        file = (
            home / {"user file": ".pip/pip.conf", "named file": "named.conf", "XDG file": ".config/pip/pip.conf"}[way]
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if way == "named file":
            monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    (home / "pip.py").write_text("raise SystemExit('a file of the working directory was run')\n")
    tree = Tree(tmp_path / "desk")
    tree.make()
    environment = Environment(ours, Steps(tree))
    environment.pip("probe", "--no-deps", "--no-index", "--force-reinstall", source)
    assert (environment.packages / "onedesk_probe.py").is_file()
    assert not elsewhere.exists()
    assert not list(theirs.rglob("onedesk_probe*"))
    environment.steps.run("probe", [environment.python, "-I", "-m", "pip", "uninstall", "--yes", "onedesk-probe"], "")


NAMES = st.sampled_from(PASSED + LEADS_ELSEWHERE) | st.from_regex(r"[a-z][a-z_-]{0,20}", fullmatch=True)


@given(variables=st.dictionaries(NAMES, st.text("abc:/ ", min_size=1)), upper=st.booleans())
def test_only_pip_variables_for_an_index_pass(variables: dict[str, str], upper: bool) -> None:
    spelled = {
        ("PIP_" if upper else "pip_") + name.replace("-", "_").upper(): value for name, value in variables.items()
    }
    passed = pip_environment({**spelled, "PIP_CONFIG_FILE": "/dev/null", "HOME": "/"})
    allowed = {"PIP_" + name.upper().replace("-", "_") for name in PASSED} | {"PIP_CONFIG_FILE"}
    assert {name for name in passed if name.upper().startswith("PIP_")} <= allowed
    assert passed["PIP_CONFIG_FILE"] == "/dev/null"
    for name in PASSED:
        if name in variables:
            assert "PIP_" + name.upper().replace("-", "_") in passed


def test_files_say_how_to_reach_an_index_and_the_nearest_wins(tmp_path: Path) -> None:
    user, site, named = (
        tmp_path / ".config" / "pip" / "pip.conf",
        tmp_path / "env" / "pip.conf",
        tmp_path / "named.conf",
    )
    for file in (user, site):
        file.parent.mkdir(parents=True)
    user.write_text(
        "[global]\nindex-url = user\ntimeout = 3\nfind_links = a\n  b\n[install]\ntarget = x\n[download]\nproxy = p\n"
    )
    site.write_text("[install]\nindex-url = site\nprefix = x\n")
    plain = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "none"), "SSL_CERT_FILE": "kept"}
    wanted = {"INDEX_URL": "site", "TIMEOUT": "3", "FIND_LINKS": "a\nb", "PROXY": "p", "CONFIG_FILE": "/dev/null"}
    passed = pip_environment(plain, tmp_path / "env")  # with what /etc/pip.conf of this machine adds
    assert passed == passed | plain | {f"PIP_{name}": value for name, value in wanted.items()}
    assert not {"PIP_TARGET", "PIP_PREFIX"} & passed.keys()
    named.write_text("[global]\nindex-url = named\n")
    assert pip_environment(plain | {"PIP_CONFIG_FILE": str(named)})["PIP_INDEX_URL"] == "named"
    assert pip_environment(plain | {"PIP_CONFIG_FILE": str(named)}).get("PIP_TIMEOUT") != "3"
    assert (
        pip_environment(plain | {"PIP_CONFIG_FILE": str(named), "PIP_INDEX_URL": "variable"})["PIP_INDEX_URL"]
        == "variable"
    )


@pytest.mark.parametrize("content", [b"\xff\xfe", b"no section", b"[global", b"[global]\na=1\n[global]\nb=2\n"])
def test_a_broken_file_counts_for_nothing(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "pip.conf"
    file.write_bytes(content)
    caplog.set_level("INFO")
    assert "PIP_INDEX_URL" not in pip_environment(
        {"PIP_CONFIG_FILE": str(file), "HOME": "/nowhere", "XDG_CONFIG_DIRS": "/nowhere"}
    )
    assert f"{file} cannot be read and counts for nothing" in caplog.text
