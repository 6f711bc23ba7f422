"""What stands between a connection and the APIs: limits, ids of calls, logs, metrics."""
