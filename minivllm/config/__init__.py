"""Configuration: composed, validated and explained without torch."""
