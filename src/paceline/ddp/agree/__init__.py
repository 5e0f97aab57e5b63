"""What ranks tell each other besides gradients, and the errors that all of them raise alike."""
