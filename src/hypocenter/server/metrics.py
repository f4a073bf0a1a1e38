"""What is counted, under vLLM's names where it has one, for the dashboards that know those.

https://docs.vllm.ai/en/latest/design/metrics.html
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from hypocenter.server.generation import Generation
from hypocenter.server.inquiry import Choice
from hypocenter.server.supervisor import Supervisor

_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
             10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
            40, 80)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The counters of one server; `text` is what `/metrics` answers."""

    def __init__(self, supervisor: Supervisor, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(supervisor, model))

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(name, what, ["model_name", *labels], registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, ["model_name"], buckets=buckets, registry=registry)
            return made.labels(model)

        self._model = model
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.").labels(model)
        self._generated = counter("vllm:generation_tokens", "Tokens generated.").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens sought.").labels(model)
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found.").labels(model)
        self._preempted = counter("vllm:num_preemptions", "Preemptions.").labels(model)
        self._success = counter("vllm:request_success", "Requests that ended.", "finished_reason")
        self._first = histogram("vllm:time_to_first_token_seconds", "From its arrival.", _TO_FIRST)
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "Mean of each request.", _BETWEEN
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Whole requests.", _WHOLE)
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Of prompts.", _TOKENS)
        self._sizes = histogram("vllm:request_generation_tokens", "Of answers.", _TOKENS)
        self._events = {
            what: counter(f"hypocenter:{name}", text).labels(model)
            for what, name, text in (
                ("fault", "faults", "Workers that died of a fault."),
                ("restarted", "worker_restarts", "Workers started in place of another."),
                ("resumed", "requests_resumed", "Requests that outlived their worker."),
                ("paused", "requests_paused", "Requests that gave way to another client."),
                ("quarantined", "quarantined_requests", "Requests given up."),
                ("bundle", "crash_bundles", "Bundles that were saved."),
                ("refused", "requests_refused", "Requests refused for want of room."),
                ("cancelled", "requests_cancelled", "Requests whose clients left."),
            )
        }

    def count(self, what: str) -> None:
        """Something happened that has no figure besides itself."""
        self._events[what].inc()

    def count_end(self, choice: Choice, *, is_first_of_prompt: bool) -> None:
        """A choice ended by itself."""
        generation, ending, now = choice.generation, choice.ending, time.monotonic()
        assert ending is not None
        num_prompt, num_out = len(generation.prompt_ids or ()), len(generation.output_ids)
        if is_first_of_prompt:
            self._prompt.inc(num_prompt)
            self._prompt_sizes.observe(num_prompt)
        self._queries.inc(num_prompt)
        self._hits.inc(ending.num_cached_tokens)
        self._preempted.inc(ending.num_preemptions)
        self._generated.inc(num_out)
        self._sizes.observe(num_out)
        self._success.labels(self._model, ending.reason).inc()
        self._whole.observe(now - generation.submitted)
        _observe_pace(generation, self._first, self._between)

    def text(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)


def _observe_pace(generation: Generation, first: Histogram, between: Histogram) -> None:
    begin, end = generation.first_token, generation.last_token
    if begin is None or end is None:
        return
    first.observe(begin - generation.submitted)
    if (num_later := len(generation.output_ids) - 1) > 0:
        between.observe((end - begin) / num_later)


class _Gauges:
    """What is so at the moment that somebody asks."""

    def __init__(self, supervisor: Supervisor, model: str) -> None:
        self._supervisor, self._model = supervisor, model

    def collect(self) -> Iterable[Metric]:
        state, facts = self._supervisor.state, self._supervisor.facts
        num_open = len(self._supervisor.generations)
        used = 0.0
        if facts is not None and state.num_running:
            used = 1 - state.num_free_blocks / facts.num_blocks
        values = {
            "vllm:num_requests_running": ("Requests in the batch.", state.num_running),
            "vllm:num_requests_waiting": ("Others.", max(num_open - state.num_running, 0)),
            "vllm:kv_cache_usage_perc": ("1 is all of the KV cache.", used),
            "hypocenter:worker_ready": ("Whether one is.", int(self._supervisor.is_ready)),
        }
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        if facts is not None:
            info = {
                "model_name": self._model,
                "block_size": str(facts.block_size),
                "num_gpu_blocks": str(facts.num_blocks),
            }
            config = GaugeMetricFamily("vllm:cache_config_info", "The cache.", labels=list(info))
            config.add_metric(list(info.values()), 1)
            yield config
