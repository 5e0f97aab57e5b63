"""What a commit keeps, and what is put back after a failed step."""
