"""The c10d backend ``"paceline"``: torch's names on top of the collectives."""
