"""Images: opened, cut to what a model's vision tower takes, and turned into embeddings."""
