"""Decisions about features and images."""
