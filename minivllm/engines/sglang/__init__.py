"""engine=sglang: its server, started here."""
