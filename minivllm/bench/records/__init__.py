"""Records: their schema, identity and provenance, written and read."""
