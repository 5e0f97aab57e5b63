"""How ranks of a host come to share memory, and what they have when they do."""
