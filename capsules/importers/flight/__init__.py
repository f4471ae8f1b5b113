"""Flight-recorder dumps of torch.distributed as collectives and states of ranks."""
