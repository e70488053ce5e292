"""The decision log: one entry for each decision of a stream, as durable as the decision itself."""
