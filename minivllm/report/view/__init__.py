"""What a person sees of an engine's steps, live or recorded."""
