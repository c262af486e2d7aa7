"""What Prometheus is told: counts, times and memory; of nobody's photos anything."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "prism_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "prism_request_seconds", "From the first byte to the answer.", ["endpoint"],
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self.batches = Histogram(
            "prism_batch_requests", "Requests that shared the model.",
            buckets=(1, 2, 4, 8, 16, 32), registry=self.registry,
        )  # fmt: skip
        self.busy = Counter("prism_model_seconds", "That the model was at work.", registry=self.registry)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A number that is asked for whenever someone looks."""
        Gauge(name, help, registry=self.registry).set_function(value)

    def batch(self, count: int, seconds: float) -> None:
        self.batches.observe(count)
        self.busy.inc(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
