"""What is done to a captured graph before a backend compiles it."""
