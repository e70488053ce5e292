"""Exchange samples and labels with other tools, one file each."""
