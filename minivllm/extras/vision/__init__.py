"""Images while requests are served: when towers run, and how long their embeddings are kept."""
