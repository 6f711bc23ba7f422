"""What an answer may be: the model's chat template, grammars, tokens as texts."""
