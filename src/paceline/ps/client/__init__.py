"""A trainer's side: what a batch needs, how it is asked for, and who is still owed an answer."""
