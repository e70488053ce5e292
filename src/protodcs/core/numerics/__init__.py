"""Mathematics that several methods share, in plain numpy. Nothing here has state or knows a method."""
