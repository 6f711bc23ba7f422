"""Prefix caching: which computed blocks hold the first tokens of a prompt; and what the cache keeps
for one sequence. Pure Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minivllm.cache.pool import BlockTable

# A list, or any object with a length and slices. Tokens of a simulation have `block_keys`, too.
TokenSequence = Sequence[int]


def block_keys(token_ids: TokenSequence, block_size: int, blocks: range) -> Iterable[Hashable]:
    """What the tokens of each of these blocks are compared by: themselves, as a tuple, or what a
    sequence says itself by a method of this name."""
    if hasattr(token_ids, "block_keys"):
        return iter(token_ids.block_keys(block_size, blocks))
    return (tuple(token_ids[i * block_size : (i + 1) * block_size]) for i in blocks)


class PrefixNode:
    """One full block of tokens that follow the tokens of its parent, and where its keys and values
    are stored."""

    __slots__ = ("block", "children", "parent", "record", "slot", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: Hashable) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[Hashable, PrefixNode] = {}
        self.block = 0  # on the device; 0: none
        self.slot: int | None = None  # in host memory
        self.record: int | None = None  # on disk

    @property
    def attached(self) -> bool:
        """Whether the node is part of a tree, so that a look-up may return it."""
        return self.parent is not None


class PrefixChange(NamedTuple):
    """A block came to hold a node's content, or holds it no longer."""

    node: PrefixNode
    block: int
    stored: bool


class PrefixIndex:
    """A tree of computed blocks, as SGLang's RadixAttention (Zheng et al. 2024) has it, cut at
    block size.

    A block's hash is chained through its parent: a node is in its parent's dictionary under its
    tokens, which Python compares after their hashes match, so that a collision never gives a
    request a wrong block.

    Args:
        block_size: tokens a block.
        most_reusable: blocks that a request may begin with.
    """

    def __init__(self, block_size: int, most_reusable: int) -> None:
        self.block_size, self.most_reusable = block_size, most_reusable
        self.root = PrefixNode(None, ())
        self.by_block: dict[int, PrefixNode] = {}
        # Nodes that got a block or lost it, for a listener that takes them; None: nobody listens.
        self.changes: list[PrefixChange] | None = None

    def _note(self, node: PrefixNode, block: int, stored: bool) -> None:
        if self.changes is not None and block:
            self.changes.append(PrefixChange(node, block, stored))

    def known(self, token_ids: TokenSequence) -> list[PrefixNode]:
        """The nodes that a request with these tokens may begin with. They never cover all tokens,
        as the request must compute the last one."""
        most = min((len(token_ids) - 1) // self.block_size, self.most_reusable)
        return self.match(token_ids, most)

    def match(self, token_ids: TokenSequence, most: int) -> list[PrefixNode]:
        """The nodes that hold the first tokens, at most `most`, in order."""
        node, nodes = self.root, list[PrefixNode]()
        for tokens in block_keys(token_ids, self.block_size, range(most)):
            if (child := node.children.get(tokens)) is None:
                break
            nodes.append(node := child)
        return nodes

    def insert(self, parent: PrefixNode, tokens: Hashable, block: int) -> PrefixNode:
        """Note that `block` holds `tokens` after those of `parent`. If a block is already known for
        these tokens, that block stays."""
        if parent is not self.root and not parent.attached:
            return PrefixNode(None, tokens)  # no look-up reaches its parent
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PrefixNode(parent, tokens)
        if not node.block:
            self.place(node, block)
        return node

    def place(self, node: PrefixNode, block: int) -> None:
        """Note that `block` holds the node's content, or will hold it before a step needs it."""
        node.block = block
        self.by_block[block] = node
        self._note(node, block, True)

    def take_block(self, block: int) -> PrefixNode:
        """Detach a cached block from its node, and return the node."""
        node = self.by_block.pop(block)
        node.block = 0
        self._note(node, block, False)
        return node

    def displace(self, block: int) -> None:
        """Note that the device overwrites a cached block: its content is lost."""
        self.lose(self.take_block(block))

    def lose(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a node that is stored nowhere from the tree, with all nodes below it, which no
        look-up would reach. Returns the removed nodes."""
        if node.parent is not None:
            del node.parent.children[node.tokens]
        gone = [node]
        for one in gone:
            gone += one.children.values()
            one.children, one.parent = {}, None
            self.by_block.pop(one.block, None)
            self._note(one, one.block, False)
            one.block = 0
        return gone


@dataclass(eq=False, slots=True)
class CachedSequence:
    """Where the keys and values of one sequence are stored. Only the cache changes it; a request
    owns it."""

    block_table: BlockTable = field(default_factory=BlockTable)
    num_evicted: int = 0  # computed tokens that the cache no longer holds
    num_reused: int = 0  # tokens that other requests had computed when it was last admitted
    prefix_nodes: list[PrefixNode] = field(default_factory=list)  # of full, cached blocks
    # Attention scores of each block, where eviction needs them.
    block_scores: list[float] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)  # of its blocks while it is swapped out
    was_looked_ahead: bool = False  # whether its blocks were read from disk ahead
    disk_ticket: int | None = None  # None until its blocks are requested
