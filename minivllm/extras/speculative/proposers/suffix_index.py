"""Where runs of tokens occur in one text or in several."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_VOTES = 8  # latest occurrences that vote on a draft, so that a vote takes constant time
NOWHERE = -1
END = -1  # the mark after a text, which is no token
Run = tuple[int, ...]


class SuffixIndex:
    """Occurrences of the runs of 1, 2, 4, ... tokens in texts, linked from each to the one before.

    This stands for a suffix tree: its node at such a depth is a list of occurrences, and the
    branches below it are the texts that follow. For each length a token takes an entry under the
    run before it and a link to the entry that was there, both in constant time; a look-up takes one
    dictionary access. Keys are the tokens themselves, so that a collision of hashes finds nothing
    wrong.

    Args:
        longest: run to look up, in tokens.
    """

    def __init__(self, longest: int) -> None:
        self.lengths = [1 << power for power in range(longest.bit_length())]
        self.tokens: list[int] = []  # of all texts
        self._num_dropped = 0  # tokens before those; positions count them
        self._text_start = 0  # place in `tokens` of the text that `extend` continues
        # For each length: run -> position of the token after its latest occurrence, and for each
        # token the position of the one after the run's occurrence before.
        self.latest: list[dict[Run, int]] = [{} for _ in self.lengths]
        self.earlier = [array("q") for _ in self.lengths]
        self._levels = list(zip(self.lengths, self.latest, self.earlier, strict=True))

    def __len__(self) -> int:
        """Tokens of all texts, with the marks after them."""
        return len(self.tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the last text."""
        tokens, dropped, start = self.tokens, self._num_dropped, self._text_start
        begin = len(tokens)
        tokens += token_ids
        for place in range(begin, len(tokens)):
            for length, latest, earlier in self._levels:
                if place - start < length:
                    earlier.append(NOWHERE)
                    continue
                run = tuple(tokens[place - length : place])
                earlier.append(latest.get(run, NOWHERE))
                latest[run] = place + dropped

    def end_text(self) -> None:
        """Begin another text."""
        self.tokens.append(END)
        for earlier in self.earlier:
            earlier.append(NOWHERE)
        self._text_start = len(self.tokens)

    def drop(self, count: int) -> None:
        """Forget the first `count` tokens, which are whole texts with their marks."""
        for length, latest, earlier in self._levels:
            for place in range(length, count):
                run = tuple(self.tokens[place - length : place])
                if latest.get(run) == place + self._num_dropped:
                    del latest[run]
            del earlier[:count]
        del self.tokens[:count]
        self._num_dropped += count
        self._text_start -= count

    def occurrences(self, level: int, run: Run) -> list[int]:
        """The latest occurrences of a run of `lengths[level]` tokens, latest first, at most
        MOST_VOTES: the place in `tokens` of the token after each."""
        places: list[int] = []
        position = self.latest[level].get(run, NOWHERE)
        dropped, earlier = self._num_dropped, self.earlier[level]
        while position >= dropped and len(places) < MOST_VOTES:
            places.append(position - dropped)
            position = earlier[position - dropped]
        return places

    def continuation(self, places: list[int], most: int, least_share: float) -> list[int]:
        """The tokens that most of the occurrences agree on, at most `most`.

        Each token is the most frequent one among the occurrences that agree with the draft so far,
        of equally frequent ones that of the latest occurrence. A draft ends where most texts end,
        and where the product of the shares of those that agreed falls below `least_share`.

        Args:
            places: of the first token after each occurrence, at least one, latest first.
        """
        tokens, end = self.tokens, len(self.tokens)
        draft: list[int] = []
        share = 1.0
        for step in range(most):
            votes = [tokens[place + step] for place in places]
            token = votes[0]
            if (count := votes.count(token)) < len(votes):
                token = max(votes, key=votes.count)
                count = votes.count(token)
                share *= count / len(votes)
                places = [place for place, vote in zip(places, votes, strict=True) if vote == token]
            if token == END or share < least_share:
                break
            draft.append(token)
            if places[0] + step + 1 == end:  # only the latest can be followed by nothing yet
                places = places[1:]
                if not places:
                    break
        return draft
