"""The machine under test: limits, energy, telemetry, clocks."""
