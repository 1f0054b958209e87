"""What Prometheus is told of an engine."""

from __future__ import annotations

import threading
import time
from collections import deque

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SPAN = 10  # seconds
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters, gauges and histograms of one engine, in a registry of their own.

    Outcomes of a request: stop, length, cancelled, timeout, rejected (the queue was full, or the
    server ended), error. Beside them are the process's own memory, time and open files.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, told: str, *labels: str) -> Counter:
            return Counter(f"path_attention_{name}", told, labels, registry=registry)

        def gauge(name: str, told: str) -> Gauge:
            return Gauge(f"path_attention_{name}", told, registry=registry)

        def seconds(
            name: str, told: str, *labels: str, buckets: tuple[float, ...] = _SECONDS
        ) -> Histogram:
            name = f"path_attention_{name}_seconds"
            return Histogram(name, told, labels, buckets=buckets, registry=registry)

        self.responses = counter("http_responses", "Responses, by status", "status")
        self.requests = counter("requests", "Requests that ended, by outcome", "outcome")
        self.request_seconds = seconds(
            "request", "From a request's arrival to its end, by outcome", "outcome"
        )
        self.queue_seconds = seconds("queue", "That requests waited before they were taken up")
        self.queued = gauge("queue_length", "Requests that wait")
        self.running = gauge("running_answers", "Answers being written")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were taken up")
        self.output_tokens = counter("output_tokens", "Tokens written")
        self.speed = Speed()
        told = f"Tokens written, over the last {_SPAN} seconds"
        gauge("output_tokens_per_second", told).set_function(self.speed.value)
        self.first_token = seconds(
            "time_to_first_token", "From arrival to the first token of an answer"
        )
        self.each_token = seconds(
            "time_per_output_token", "Between tokens of an answer", buckets=_EACH
        )
        self.cache_bytes = gauge("cache_bytes", "Bytes of running requests' caches")
        self.cache_limit = gauge("cache_limit_bytes", "The most that these may come to")
        self.prefix_bytes = gauge("prefix_store_bytes", "Bytes of kept prefixes")
        self.prefix_lookups = counter("prefix_lookups", "Requests that looked for a kept prefix")
        self.prefix_hits = counter("prefix_hits", "Requests that started from a kept prefix")
        self.prefix_tokens = counter("prefix_hit_tokens", "Tokens that were not computed again")
        self.proposed = counter("proposed_tokens", "Tokens that drafts proposed")
        self.accepted = counter("accepted_tokens", "Proposed tokens that were accepted")

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)


class Speed:
    """Events a second, over the last whole seconds; counted on one thread, read on any."""

    def __init__(self) -> None:
        self._lock, self._seconds = threading.Lock(), deque[list[int]](maxlen=_SPAN + 1)

    def add(self, count: int) -> None:
        """So many more, now."""
        now = int(time.monotonic())
        with self._lock:
            if not self._seconds or self._seconds[-1][0] != now:
                self._seconds.append([now, 0])
            self._seconds[-1][1] += count

    def value(self) -> float:
        """Of the seconds before this one."""
        now = int(time.monotonic())
        with self._lock:
            return sum(count for at, count in self._seconds if now - _SPAN <= at < now) / _SPAN
