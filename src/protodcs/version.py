"""The version, in its own module so that every package can import it."""

__version__ = "0.1.0"
