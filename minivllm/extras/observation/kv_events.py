"""Changes of the prefix cache in the form of vLLM's KV events."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from minivllm.cache.prefix import PrefixChange, PrefixIndex, PrefixNode

MEDIUM = "GPU"  # vLLM's word for the device, whatever it is


class KVEvents:
    """Names cached blocks by hashes that are chained through the parent.

    Args:
        prefix: the index whose changes are reported.
    """

    def __init__(self, prefix: PrefixIndex) -> None:
        self._prefix = prefix
        self._hashes: dict[int, str] = {}  # of cached blocks, by block

    def _hash(self, node: PrefixNode) -> str:
        """The hash of a node, from that of its nearest ancestor on the device, or the root."""
        path: list[PrefixNode] = []
        at: PrefixNode | None = node
        while at is not None and at.block not in self._hashes:
            path.append(at)
            at = at.parent
        digest = "" if at is None else self._hashes[at.block]
        for one in reversed(path):
            # A simulation's tokens are no tuple, but are equal, with equal hashes, where they stand
            # for the same text.
            content = one.tokens if isinstance(one.tokens, tuple) else hash(one.tokens)
            digest = blake2b(f"{digest} {content}".encode(), digest_size=8).hexdigest()
        return digest

    def events(self, changes: Sequence[PrefixChange]) -> list[dict[str, Any]]:
        """BlockStored, BlockRemoved and AllBlocksCleared events of these changes, in order."""
        events: list[dict[str, Any]] = []
        if changes and not self._prefix.by_block and not any(one.stored for one in changes):
            self._hashes.clear()
            return [{"type": "AllBlocksCleared"}]
        event: dict[str, Any]
        last: PrefixNode | None = None  # the node that the last event stored
        for node, block, stored in changes:
            if not stored:
                removed = self._hashes.pop(block, None)
                last = None
                if removed is not None:
                    event = {"type": "BlockRemoved", "block_hashes": [removed]}
                    events.append({**event, "blocks": [block], "medium": MEDIUM})
                continue
            if node.block != block:  # lost again since
                continue
            digest = self._hash(node)
            self._hashes[block] = digest
            if last is not None and node.parent is last:
                events[-1]["block_hashes"].append(digest)
                events[-1]["blocks"].append(block)
            else:
                parent = node.parent
                is_first = parent is None or parent is self._prefix.root
                event = {
                    "type": "BlockStored",
                    "block_hashes": [digest],
                    "parent_block_hash": None if is_first or parent is None else self._hash(parent),
                    "block_size": self._prefix.block_size,
                    "blocks": [block],
                    "medium": MEDIUM,
                }
                events.append(event)
            last = node
        return events

    def all(self) -> list[dict[str, Any]]:
        """A BlockStored for every block that is cached now, parents first."""
        self._hashes.clear()
        nodes = [self._prefix.root]
        changes = []
        for node in nodes:
            nodes += node.children.values()
            if node.block:
                changes.append(PrefixChange(node, node.block, True))
        return self.events(changes)
