"""Counters, gauges and histograms of a server in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from labkit.engine.metrics import Snapshot
from labkit.server.call import Piece
from labkit.server.spread import Spread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAITS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLES = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)

# Of labkit.engine.metrics.Counters; the names end in _total.
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts taken.",
    "generated_tokens": "Tokens generated.",
    "prefill_tokens": "Prompt tokens computed, recomputation included and cached ones not.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "steps": "Engine cycles that held work.",
    "prefill_decode_overlap_steps": "Cycles with prefill and decode work both.",
    "prefill_decode_stream_overlap_steps": "Those where both ran on two CUDA streams.",
    "preemptions": "Answers put back to the queue.",
}


class EngineCollector(Collector):
    """The engine's own figures, read when somebody scrapes.

    Args:
        state: gives the last snapshot. draining, failed: what the server is up to.
    """

    def __init__(
        self, state: Callable[[], Snapshot], draining: Callable[[], bool], failed: Callable[[], bool]
    ) -> None:
        self._state, self._draining, self._failed = state, draining, failed

    def collect(self) -> Iterable[Metric]:
        state = self._state()
        counters = state.counters
        for name, words in _COUNTERS.items():
            value = getattr(counters, "output_tokens" if name == "generated_tokens" else name)
            yield CounterMetricFamily(f"labkit_{name}", words, value=value)
        ended = CounterMetricFamily(
            "labkit_answers", "Answers that have ended, by reason.", labels=["reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([reason], counters.finished.get(reason, 0))
        yield ended
        answers = GaugeMetricFamily(
            "labkit_answers_now", "Answers in the engine, by state.", labels=["state"]
        )
        for name in ("waiting", "prefilling", "decoding"):
            answers.add_metric([name], getattr(state, name))
        yield answers
        blocks = GaugeMetricFamily("labkit_kv_blocks", "Blocks of the KV pool, by state.", labels=["state"])
        for name in ("used", "idle", "free"):
            blocks.add_metric([name], getattr(state, f"blocks_{name}"))
        yield blocks
        yield GaugeMetricFamily("labkit_draining", "1 while nothing new is taken.", value=self._draining())
        yield GaugeMetricFamily("labkit_failed", "1 when the engine has broken down.", value=self._failed())


class Meters:
    """What one server counts itself; used on its event loop.

    Attributes:
        requests: HTTP requests to the two endpoints that generate, by outcome: "ok"; "refused" (4xx but
            429), "overloaded" (429), "draining" (503), "cancelled" (the client left), "failed" (5xx, or an
            error in a stream).
    """

    def __init__(self, engine: EngineCollector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(engine)
        self.requests = Counter(
            "labkit_requests", "Requests by outcome.", ["endpoint", "outcome"], registry=self.registry
        )
        self._ttft = self._spread("time_to_first_token", "Arrival to first token, by answer.", _WAITS)
        self._itl = self._spread("inter_token_latency", "Every gap between two tokens.", _GAPS)
        self._tpot = self._spread("time_per_output_token", "Mean gap, by answer.", _GAPS)
        self._seconds = self._spread("answer", "Arrival to end, by answer.", _WHOLES)

    def heard(self, piece: Piece) -> None:
        """News of an answer."""
        if piece.ttft is not None:
            self._ttft.observe(piece.ttft)
        for gap in piece.gaps:
            self._itl.observe(gap)
        if piece.tpot is not None:
            self._tpot.observe(piece.tpot)
        if piece.seconds is not None:
            self._seconds.observe(piece.seconds)

    def text(self) -> bytes:
        """For Prometheus."""
        return generate_latest(self.registry)

    def _spread(self, name: str, words: str, bounds: tuple[float, ...]) -> Spread:
        spread = Spread(f"labkit_{name}_seconds", words, bounds)
        self.registry.register(spread)
        return spread
