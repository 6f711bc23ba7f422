"""Prefix caching: which computed blocks hold the start of a prompt that comes again. Pure
Python."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

# A list, or for simulation anything that has a length and slices.
TokenSequence = Sequence[int]


class PrefixNode:
    """One full block of tokens after those of its parent, and where its keys and values lie now."""

    __slots__ = ("block", "children", "parent", "record", "slot", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: Hashable) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[Hashable, PrefixNode] = {}
        self.block = 0  # on the device; 0 is nowhere
        self.slot: int | None = None  # in host memory
        self.record: int | None = None  # on disk

    @property
    def attached(self) -> bool:
        """Whether it hangs in a tree, and so may be found."""
        return self.parent is not None


class PrefixIndex:
    """A tree of computed blocks, as SGLang's RadixAttention (Zheng et al. 2024) has it, cut at
    block size.

    A block's hash is chained through its parent: a node lies in its parent's dictionary under its
    tokens, which Python compares after their hash has matched, so that a collision can never give a
    request a wrong block.

    Args:
        block_size: tokens a block.
        most_reusable: blocks that a request may begin with.
    """

    def __init__(self, block_size: int, most_reusable: int) -> None:
        self.block_size, self.most_reusable = block_size, most_reusable
        self.root = PrefixNode(None, ())
        self.by_block: dict[int, PrefixNode] = {}

    def tokens(self, token_ids: TokenSequence, index: int) -> Hashable:
        """The tokens of one block. A list becomes a tuple; other sequences' slices are hashable as
        they are."""
        part = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return tuple(part) if isinstance(part, list) else part

    def known(self, token_ids: TokenSequence) -> Iterator[PrefixNode]:
        """The nodes that a request with these tokens may begin with: never all of its tokens, as it
        must compute the last one."""
        return self.match(
            token_ids, min((len(token_ids) - 1) // self.block_size, self.most_reusable)
        )

    def match(self, token_ids: TokenSequence, most: int) -> Iterator[PrefixNode]:
        """The nodes that hold the first tokens, at most `most`, in order."""
        node = self.root
        for index in range(most):
            child = node.children.get(self.tokens(token_ids, index))
            if child is None:
                return
            yield child
            node = child

    def insert(self, parent: PrefixNode, tokens: Hashable, block: int) -> PrefixNode:
        """Note that `block` holds `tokens` after those of `parent`; a block that is known for them
        stays."""
        if parent is not self.root and not parent.attached:
            return PrefixNode(None, tokens)  # nobody would find it
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = PrefixNode(parent, tokens)
        if not node.block:
            self.place(node, block)
        return node

    def place(self, node: PrefixNode, block: int) -> None:
        """Note that the node's content lies, or will lie before it is needed, in `block`."""
        node.block = block
        self.by_block[block] = node

    def take_block(self, block: int) -> PrefixNode:
        """The node of a cached block, which holds something else from now on."""
        node = self.by_block.pop(block)
        node.block = 0
        return node

    def displace(self, block: int) -> None:
        """Note that the device takes a cached block for something else: its content is lost."""
        self.lose(self.take_block(block))

    def lose(self, node: PrefixNode) -> list[PrefixNode]:
        """Take a node that is nowhere any more out of the tree, with all below it, which nobody
        would find: the nodes lost."""
        if node.parent is not None:
            del node.parent.children[node.tokens]
        gone = [node]
        for one in gone:
            gone += one.children.values()
            one.children, one.parent = {}, None
            self.by_block.pop(one.block, None)
            one.block = 0
        return gone
