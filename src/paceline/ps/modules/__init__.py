"""Modules of torch whose tables live on servers: what users write in a model."""
