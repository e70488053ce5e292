"""Where streams are kept: plain files for one process, Redis for many; `open_store` chooses by the address."""
