"""Webhooks of a tenant."""
