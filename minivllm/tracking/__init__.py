"""Trackers, which copy each record to another system, such as MLflow."""
