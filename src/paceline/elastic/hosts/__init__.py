"""What an elastic job has to know of its hosts. Must not import torch."""
