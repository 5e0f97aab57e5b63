"""What lies in the memory that ranks share, as the native core and its callers know it."""
