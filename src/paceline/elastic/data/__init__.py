"""The data of an elastic job: which samples a rank trains on, and where an epoch stands."""
