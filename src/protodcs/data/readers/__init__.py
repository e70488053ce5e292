"""Readers of image sets, one file for each format they are published in; `sets.py` beside this folder knows them."""
