"""Workers hold the streams of a process in memory, and load, change and unload them."""
