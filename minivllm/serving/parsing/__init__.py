"""Answers of models taken apart as they come: thoughts, tool calls and text."""
