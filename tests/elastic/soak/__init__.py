"""``make soak``: elastic jobs whose ranks are killed at random moments, and what holds after."""
