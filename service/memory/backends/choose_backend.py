"""Chooses the memory backend for a device, and describes what each backend can do here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...errors import OnedeskError
from ..truth import device_index
from .cuda import CudaBackend
from .managed import ManagedBackend
from .mapped import MappedBackend
from .protocol import Backend


@dataclass(frozen=True, slots=True)
class BackendReport:
    """A backend for people: what was tried on this machine and whether it worked, or why it cannot be used."""

    name: str
    residency: str
    can: Mapping[str, bool]
    missing: str = ""


def choose_backend(device: str, *, managed: bool, oversubscribe: bool) -> Backend:
    """The backend for leases on `device`. Raises RequestError if there is no such device, or managed memory is
    requested but unavailable.
    """
    if device_index(device) is None:
        return MappedBackend()
    return ManagedBackend(device, oversubscribe=oversubscribe) if managed else CudaBackend(device)


def describe_backends(device: str) -> Iterator[BackendReport]:
    """Every backend for leases on `device`, and that of the host."""
    yield _report(MappedBackend())
    if device_index(device) is not None:
        yield _report(CudaBackend(device))
        try:
            yield _report(ManagedBackend(device))
        except OnedeskError as error:
            yield BackendReport(ManagedBackend.name, ManagedBackend.residency, {}, str(error))


def _report(backend: Backend) -> BackendReport:
    return BackendReport(backend.name, backend.residency, backend.capabilities())
