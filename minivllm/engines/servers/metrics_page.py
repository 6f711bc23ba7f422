"""What a server's /metrics says, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from minivllm.engines.openai.stream_event import ServerError
from minivllm.platform.untrusted import printable


@dataclass(frozen=True)
class MetricsPage:
    """One reading of /metrics: its samples by name, one for each set of labels."""

    samples: Mapping[str, tuple[Sample, ...]]

    @classmethod
    def parse(cls, text: str) -> MetricsPage:
        """Read a page. Raises ServerError where it is none."""
        samples: dict[str, tuple[Sample, ...]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples[sample.name] = (*samples.get(sample.name, ()), sample)
        except (ValueError, KeyError, IndexError) as error:
            words = printable(str(error))
            raise ServerError(f"/metrics is not in Prometheus' format ({words})") from None
        return cls(samples)

    def total(self, name: str) -> float | None:
        """The sum over all sets of labels; None where there is no such metric."""
        found = self.samples.get(name)
        return None if found is None else float(sum(sample.value for sample in found))

    def label(self, name: str, label: str) -> str | None:
        """The value of a label of the first sample; None where there is none."""
        found = self.samples.get(name, ())
        return found[0].labels.get(label) if found else None

    def since(self, before: MetricsPage, name: str) -> float | None:
        """How much a counter has grown; one that has appeared meanwhile began at 0."""
        now = self.total(name)
        return None if now is None else now - (before.total(name) or 0.0)

    def largest_bucket(self, before: MetricsPage, name: str) -> float | None:
        """The upper bound of the highest bucket of a histogram that has got an observation since;
        None where none has."""
        earlier = {s.labels.get("le"): s.value for s in before.samples.get(f"{name}_bucket", ())}
        grown = sorted(
            (float(sample.labels["le"]), sample.value - earlier.get(sample.labels["le"], 0.0))
            for sample in self.samples.get(f"{name}_bucket", ())
        )
        total = grown[-1][1] if grown else 0.0  # buckets are cumulative
        return next((bound for bound, count in grown if total and count == total), None)
