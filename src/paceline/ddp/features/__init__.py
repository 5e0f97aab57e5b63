"""What a wrapper can do beyond the ordinary step, each in a file of its own."""
