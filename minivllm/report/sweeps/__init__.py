"""What a plain sweep answers: a sentence, and the picture beside it."""
