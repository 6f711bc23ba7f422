"""engine=transformers and engine=transformers_continuous."""
