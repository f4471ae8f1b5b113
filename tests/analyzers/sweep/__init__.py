"""Random incidents of the loss, from a torch path written apart from the reference, and the rates reached."""
