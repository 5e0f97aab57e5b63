"""What a wrapper can do beyond the plain step, each in a file of its own."""
