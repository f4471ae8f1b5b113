"""Rules of speed, of the stage runtime: what a step waits for."""
