"""What became of the entries of a file: requests, or left out and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MOST_NOTES = 8  # of each counter


@dataclass
class Tally:
    """Counts of what a workload does not take from a file, so that nothing is lost unseen.

    Every entry that is read becomes a request or is counted in `left_out`. Keys are the words that
    follow the count in a record's notes, such as "requests were left out, longer than the context
    of 2048".
    """

    read: int = 0  # entries: lines, conversations, rows
    left_out: Counter[str] = field(default_factory=Counter)  # entries that make no request
    unused: Counter[str] = field(default_factory=Counter)  # parts of entries that make one

    def notes(self, workload: str, num_requests: int, asked: int | None) -> tuple[str, ...]:
        """Sentences for the record.

        Args:
            workload: name of the workload's option.
            num_requests: requests that the file gave.
            asked: `workload.num_requests`.
        """
        notes = [*_sentences(self.left_out), *_sentences(self.unused)]
        if asked is not None and num_requests < asked:
            notes.append(f"{asked} requests were asked for and the file gives {num_requests}")
        return tuple(f"workload={workload}: {note}" for note in notes)


def _sentences(counts: Counter[str]) -> list[str]:
    counted = [(words, count) for words, count in counts.items() if count]
    notes = [f"{count} {words}" for words, count in counted[:MOST_NOTES]]
    if rest := counted[MOST_NOTES:]:
        notes.append(
            f"{sum(count for _, count in rest)} of {len(rest)} further kinds were not used"
        )
    return notes
