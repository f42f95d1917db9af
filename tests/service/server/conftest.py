"""One service for all tests that need no settings of their own; it lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serving import Server, write_tree


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(write_tree(tmp_path_factory.mktemp("service"), context=512)).start()
    yield made
    made.stop()


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()
