"""Reports: what records say, as tables, figures and pages."""
