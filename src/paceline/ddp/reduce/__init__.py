"""From a gradient that is ready to a bucket that is reduced."""
