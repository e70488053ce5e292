"""The service under fire: a client that writes down what it was told, a checker of it, and faults to inflict."""
