"""Where drafts come from, one proposer a file."""
