"""The field's own tasks on this engine: the model that lm-eval calls, and its command line."""
