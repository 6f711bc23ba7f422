"""What can be measured: a folder each, and what they share."""
