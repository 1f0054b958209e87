"""What Prometheus is told of an engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters, gauges and histograms of one engine, in a registry of their own.

    Outcomes of a request: stop, length, cancelled, timeout, rejected (the queue was full), error.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def name(text: str) -> str:
            return f"path_attention_{text}"

        self.requests = Counter(
            name("requests"), "Requests that ended, by outcome", ["outcome"], registry=registry
        )
        self.queued = Gauge(name("queue_length"), "Requests that wait", registry=registry)
        self.running = Gauge(name("running_answers"), "Answers being written", registry=registry)
        self.prompt_tokens = Counter(
            name("prompt_tokens"), "Tokens of prompts that were taken up", registry=registry
        )
        self.output_tokens = Counter(name("output_tokens"), "Tokens written", registry=registry)
        self.first_token = Histogram(
            name("time_to_first_token_seconds"), "From arrival to the first token of an answer",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.each_token = Histogram(
            name("time_per_output_token_seconds"), "Between tokens of an answer",
            buckets=_EACH, registry=registry,
        )  # fmt: skip
        self.cache_bytes = Gauge(
            name("cache_bytes"), "Bytes of running requests' caches", registry=registry
        )
        self.prefix_bytes = Gauge(
            name("prefix_store_bytes"), "Bytes of kept prefixes", registry=registry
        )
        self.prefix_hits = Counter(
            name("prefix_hits"), "Requests that started from a kept prefix", registry=registry
        )
        self.prefix_tokens = Counter(
            name("prefix_hit_tokens"), "Tokens that were not computed again", registry=registry
        )
        self.proposed = Counter(name("proposed_tokens"), "Tokens that drafts proposed",
                                registry=registry)  # fmt: skip
        self.accepted = Counter(name("accepted_tokens"), "Proposed tokens that were accepted",
                                registry=registry)  # fmt: skip

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)
