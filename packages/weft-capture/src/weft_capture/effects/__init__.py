"""What a captured frame does beside computing: writes, calls left for later, checks."""
