"""ProtoDCS: the method of the paper, to the letter."""
