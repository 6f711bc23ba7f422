"""Which tokens of the vocabulary may come next: bitmasks, bad words and grammars."""
