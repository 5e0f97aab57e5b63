"""``paceline report``: what a run's records say, as numbers and as one page."""
