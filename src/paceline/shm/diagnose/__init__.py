"""Why a wait takes long or a collective failed: who is missing, what it does, how it ended."""
