"""StreamDCS: the recommended method. It takes its evidence for known and unknown from the stream itself."""
