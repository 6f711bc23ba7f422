"""OpenAI's APIs: models, completions, chat completions and responses."""
