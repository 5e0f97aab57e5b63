"""Where the wrapper listens to autograd and to optimizers."""
