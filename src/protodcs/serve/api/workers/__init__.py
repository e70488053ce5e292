"""Workers of the service, for operators."""
