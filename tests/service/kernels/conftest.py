"""The compiled kernels, built once for all tests of this folder."""

from __future__ import annotations

import ctypes

import pytest
from onedesk.service.kernels.cpu.compile import compile_library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built, why_not = compile_library(tmp_path_factory.mktemp("kernels"))
    assert built is not None, why_not
    return built
