"""Who may do what, how much of it, and what is written down of it."""
