"""Rules of the stage distributed: what ranks did together, and which of them did not."""

from . import buffers, data, gradients, paths, replicas, scaling, speed, steps

__all__ = ["buffers", "data", "gradients", "paths", "replicas", "scaling", "speed", "steps"]
