"""CUDA memory snapshots as allocations, segments and out-of-memory events."""
