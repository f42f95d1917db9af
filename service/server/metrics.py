"""/metrics: the service's metrics in Prometheus's format (extra "service"), collected on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from ..memory.meminfo import read_vmstat
from .error_documents import ApiError
from .service import Service
from .statistics import Histogram

PROC = Path("/proc")
KV_KINDS = ("used", "kept", "all")
Rows = Iterable[tuple[tuple[str, ...], float]]


async def metrics(service: Service, request: web.Request) -> web.Response:
    """Every metric in Prometheus's text format."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise ApiError(
            501,
            "figures need the package prometheus_client; install it into the environment of Onedesk",
            code="not_installed",
        ) from error

    def gathered() -> bytes:
        registry = CollectorRegistry()
        registry.register(_Gatherer(service))
        return generate_latest(registry)

    body = await service.in_thread(gathered)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


class _Gatherer:
    """A collector of prometheus_client: reads everything again at each scrape, keeps nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        """The metric families."""
        yield from self._work()
        yield from self._memory()

    def _work(self) -> Iterator[Any]:
        service, figures = self._service, self._service.figures
        yield _counter("requests", "HTTP requests by route and status", ("route", "status"), _pairs(figures.answers))
        yield _counter("tokens", "Tokens by model and kind", ("model", "kind"), _pairs(figures.tokens))
        yield _counter("finishes", "Answers by how they ended", ("model", "finish"), _pairs(figures.finishes))
        yield _counter("decode_faults", "Page faults in decode", ("model", "kind"), _pairs(figures.faults))
        released = [((kind,), figures.released[kind]) for kind in ("asked", "measured")]
        yield _counter("released_bytes", "Bytes given back on request: asked and measured", ("kind",), released)
        yield _counter("releases", "Leases given back on request", (), [((), figures.released["times"])])
        yield _counter("renewals", "Models loaded anew while nobody asked", (), [((), figures.renewals)])
        yield _histogram("seconds", "Seconds by model and stage", ("model", "stage"), dict(figures.seconds))
        yield _gauge("waiting", "Requests that wait for their turn", (), [((), service.waiting)])
        yield _gauge("working", "Requests that are worked on", (), [((), len(service.working))])
        yield _gauge("read_bandwidth_share", "Decode's share of the read ceiling", ("model",), _single(figures.shares))

    def _memory(self) -> Iterator[Any]:
        registry = self._service.registry
        models = registry.models()
        yield _counter("vm_events", "The kernel's memory events since boot", ("event",), _single(read_vmstat(PROC)))
        yield _gauge(
            "model_bytes",
            "Bytes that a model holds",
            ("model",),
            [((model.name,), model.held_bytes()) for model in models],
        )
        blocks = [
            ((model.name, kind), count)
            for model in models
            for kind, count in zip(KV_KINDS, model.kv_blocks, strict=True)
        ]
        yield _gauge(
            "kv_blocks", "KV blocks of 32 tokens: used or promised, kept for reuse, in all", ("model", "kind"), blocks
        )
        pools = list({id(model.pool): model.pool for model in models}.values())
        held: dict[tuple[str, ...], float] = {}
        for lease in (lease for pool in pools for lease in pool.leases()):
            held[lease.owner, lease.kind] = held.get((lease.owner, lease.kind), 0) + lease.nbytes
        yield _gauge("leased_bytes", "Leased bytes by owner and kind", ("owner", "kind"), held.items())
        for pool in pools:
            watch, device = registry.watch(pool.device), (pool.device,)
            yield _gauge("budget_bytes", "The most that may be leased", ("device",), [(device, pool.budget.spendable)])
            yield _gauge("available_bytes", "What is left", ("device",), [(device, pool.read_truth().available)])
            yield _gauge(
                "fragmentation",
                "Share of held bytes in pieces too small to use",
                ("device",),
                [(device, pool.fragmentation())],
            )
            yield _gauge(
                "slow", "1 while short memory or heat slows admission", ("device",), [(device, float(watch.slow))]
            )
            if watch.thermal.celsius is not None:
                yield _gauge(
                    "temperature_celsius", "The hottest sensor", ("device",), [(device, watch.thermal.celsius)]
                )


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"onedesk_{name}", text, labels=labels), rows)


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"onedesk_{name}", text, labels=labels), rows)


def _histogram(name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, str], Histogram]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(f"onedesk_{name}", text, labels=labels)
    for values, histogram in rows.items():
        family.add_metric(values, histogram.cumulative(), histogram.total)
    return family


def _filled(family: Any, rows: Rows) -> Any:
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _pairs(counted: Mapping[tuple[Any, ...], float]) -> list[tuple[tuple[str, ...], float]]:
    return [(tuple(map(str, key)), value) for key, value in dict(counted).items()]


def _single(counted: Mapping[str, float]) -> list[tuple[tuple[str, ...], float]]:
    return [((name,), value) for name, value in dict(counted).items()]
