"""Vocabularies that streams share: upload, and find."""
