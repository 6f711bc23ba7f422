"""What searches found: the rate that an engine can take, and the best configuration of a tuning."""
